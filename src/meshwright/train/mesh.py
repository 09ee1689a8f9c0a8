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
from meshwright.train.comm import Axis, Clock, Group

Groups = list[list[int]]
Join = Callable[[Groups], Axis]
NewGroup = Callable[[list[int]], Group | dist.ProcessGroup | None]


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
    cuts these replicas into those of this rank's domain and those across, and experts have no
    levels. `sequence` joins the ranks that share a sequence (cp, and tp where routers see slices of
    it), `lanes` those of a stage that see different tokens. `down` and `up` join the stages, one
    for each direction, so that no receive of one stands before a send of the other. `parts` and
    `ends` are for what follows on the passes of a step: the ranks of tp, and those of the first and
    the last stage.
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
    parts: Axis
    ends: Axis
    world: Axis

    @property
    def dp_index(self) -> int:
        """Place among all data-parallel ranks, replicate-major."""
        return self.at.dp_replicate * self.layout.dp_shard + self.at.dp_shard

    def wait_for_all(self) -> None:
        """Return once every rank has come here."""
        self.world.all_reduce(torch.zeros(1))


def build_mesh(
    layout: Layout,
    rank: int,
    clock: Clock,
    new_group: NewGroup | None = None,
    after: NewGroup | None = None,
) -> Mesh:
    """Create every process group of `layout`; all ranks must call it, in the same order.

    `new_group` makes a group of the ranks that it is given, in the place of torch's: a dry run has
    no peers to meet. `after` makes those for what follows on the passes of a step, where that can
    be repeated alone.
    """
    join = _joiner(rank, clock, new_group or _meet)
    joined = _once(join)
    join_after = join if after is None else _joiner(rank, clock, after)

    def axis(*names: AxisName) -> Axis:
        return joined(groups(layout, *names))

    over: tuple[AxisName, ...] = ("dp_shard", "cp")
    shards, copies = (over, ()) if layout.zero_stage else ((), over)
    slices: tuple[AxisName, ...] = ("tp",) if layout.tp > 1 and layout.etp != layout.tp else ()
    pipelines = groups(layout, "pp")
    last = rank_of(layout.virtual_stages - 1, layout.schedule, layout.pp)
    return Mesh(
        layout=layout,
        rank=rank,
        at=coordinates(layout, rank),
        clock=clock,
        tp=axis("tp"),
        cp=axis("cp"),
        shards=axis(*shards),
        replicas=axis("dp_replicate", *copies),
        levels=(joined(domain_groups(layout, "inside")), joined(domain_groups(layout, "across"))),
        experts=_expert_axes(layout, joined),
        sequence=axis("cp", *slices),
        lanes=axis("dp_replicate", "dp_shard", "cp", *slices),
        down=join(pipelines),
        up=join(pipelines),
        parts=axis("tp") if after is None else join_after(groups(layout, "tp")),
        ends=join_after([sorted({p[0], p[last]}) for p in pipelines]),
        world=Axis(tuple(range(layout.world)), rank, None, clock),
    )


def _expert_axes(layout: Layout, join: Join) -> ExpertAxes:
    def axis(name: ExpertAxis) -> Axis:
        return join(expert_groups(layout, name))

    return ExpertAxes(ep=axis("ep"), shards=axis("shards"), replicas=axis("replicas"))


def _meet(ranks: list[int]) -> dist.ProcessGroup | None:
    group: dist.ProcessGroup | None = dist.new_group(ranks, use_local_synchronization=True)
    return group


def _joiner(rank: int, clock: Clock, new_group: NewGroup) -> Join:
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


def _once(join: Join) -> Join:
    """`join`, where kinds with the same groups share them."""
    made: dict[str, Axis] = {}

    def joined(all_groups: Groups) -> Axis:
        key = repr(all_groups)
        if key not in made:
            made[key] = join(all_groups)
        return made[key]

    return joined
