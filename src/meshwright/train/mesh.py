"""The mesh of a running job: where this rank stands, and a group for each axis it talks on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.plan.layout import Axis as AxisName
from meshwright.plan.layout import (
    Coordinates,
    ExpertAxis,
    Layout,
    coordinates,
    domain_groups,
    expert_groups,
    groups,
)
from meshwright.plan.schedule import rank_of
from meshwright.train.comm import Axis, Clock

Groups = list[list[int]]
NewGroup = Callable[[list[int]], dist.ProcessGroup | None]


@dataclass(frozen=True)
class ExpertAxes:
    """The axes of the experts: `ep` shares them out, the others span their copies."""

    ep: Axis
    shards: Axis
    replicas: Axis


@dataclass(frozen=True)
class Mesh:
    """Axes of this rank.

    `shards` and `replicas` span the copies of every weight but experts, over dp and cp; `levels`
    cuts the replicas into those of this rank's domain and those across. `sequence` joins the ranks
    that share a sequence (cp, and tp where routers see slices of it), `lanes` those of a stage that
    see different tokens. `down` and `up` join the stages, one for each direction, so that no
    receive of one stands before a send of the other. `ends` joins the ranks of the first and the
    last stage.
    """

    layout: Layout
    rank: int
    at: Coordinates
    clock: Clock
    tp: Axis
    cp: Axis
    shards: Axis
    replicas: Axis
    levels: tuple[Axis, Axis]
    experts: ExpertAxes
    sequence: Axis
    lanes: Axis
    down: Axis
    up: Axis
    ends: Axis
    world: Axis

    @property
    def dp_index(self) -> int:
        """Place among all data-parallel ranks, replicate-major."""
        return self.at.dp_replicate * self.layout.dp_shard + self.at.dp_shard

    def wait_for_all(self) -> None:
        """Return once every rank has come here."""
        self.world.all_reduce(torch.zeros(1))


def build_mesh(layout: Layout, rank: int, clock: Clock, new_group: NewGroup | None = None) -> Mesh:
    """Create every process group of `layout`; all ranks must call it, in the same order.

    `new_group` makes a group of the ranks that it is given, in the place of torch's: a dry run has
    no peers to meet.
    """
    join, made = _joiner(rank, clock, new_group or _meet), dict[str, Axis]()

    def joined(all_groups: Groups) -> Axis:
        """Kinds with the same groups share them."""
        key = repr(all_groups)
        if key not in made:
            made[key] = join(all_groups)
        return made[key]

    def axis(*names: AxisName) -> Axis:
        return joined(groups(layout, *names))

    def expert_axis(name: ExpertAxis) -> Axis:
        return joined(expert_groups(layout, name))

    sharded = layout.zero_stage > 0
    split_lanes = layout.tp > 1 and layout.etp != layout.tp
    pipelines = groups(layout, "pp")
    last = rank_of(layout.virtual_stages - 1, layout.schedule, layout.pp)
    return Mesh(
        layout=layout,
        rank=rank,
        at=coordinates(layout, rank),
        clock=clock,
        tp=axis("tp"),
        cp=axis("cp"),
        shards=axis(*(("dp_shard", "cp") if sharded else ())),
        replicas=axis("dp_replicate", *(() if sharded else ("dp_shard", "cp"))),
        levels=(
            joined(domain_groups(layout, "inside")),
            joined(domain_groups(layout, "across")),
        ),
        experts=ExpertAxes(*(expert_axis(name) for name in ("ep", "shards", "replicas"))),
        sequence=axis("cp", *(("tp",) if split_lanes else ())),
        lanes=axis("dp_replicate", "dp_shard", "cp", *(("tp",) if split_lanes else ())),
        down=join(pipelines),
        up=join(pipelines),
        ends=join([sorted({p[0], p[last]}) for p in pipelines]),
        world=Axis(tuple(range(layout.world)), rank, None, clock),
    )


def _meet(ranks: list[int]) -> dist.ProcessGroup | None:
    group: dist.ProcessGroup | None = dist.new_group(ranks, use_local_synchronization=True)
    return group


def _joiner(rank: int, clock: Clock, new_group: NewGroup) -> Callable[[Groups], Axis]:
    """A function that makes the groups of a kind and returns this rank's axis.

    Only the members of a group meet to make it. Its name counts the groups a member has made
    before, so all members must have made as many: every kind but the last gives each rank a group
    of the same size.
    """

    def join(all_groups: Groups) -> Axis:
        ranks = next((ranks for ranks in all_groups if rank in ranks), [rank])
        group = new_group(ranks) if len(ranks) > 1 else None
        return Axis(tuple(ranks), ranks.index(rank), group, clock)

    return join
