"""The mesh of a running job: where this rank stands, and a group for each axis it talks on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.plan.layout import Axis as AxisName
from meshwright.plan.layout import Coordinates, Layout, coordinates, groups
from meshwright.train.comm import Axis, Clock


@dataclass(frozen=True)
class Mesh:
    """Axes of this rank. `ends` joins the first and the last stage (one rank if pp is 1)."""

    layout: Layout
    rank: int
    at: Coordinates
    clock: Clock
    tp: Axis
    dp_shard: Axis
    dp_replicate: Axis
    pp: Axis
    ends: Axis
    world: Axis

    @property
    def dp_index(self) -> int:
        """Place among all data-parallel ranks, replicate-major."""
        return self.at.dp_replicate * self.layout.dp_shard + self.at.dp_shard

    @property
    def first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.at.pp == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank holds the head."""
        return self.at.pp == self.layout.pp - 1

    def wait_for_all(self) -> None:
        """Return once every rank has come here."""
        self.world.all_reduce(torch.zeros(1))


def build_mesh(layout: Layout, rank: int, clock: Clock) -> Mesh:
    """Create every process group of `layout`; all ranks must call it, in the same order."""

    def axis(*names: AxisName) -> Axis:
        return _join(groups(layout, *names), rank, clock)

    pipelines = groups(layout, "pp")
    ends = [[p[0], p[-1]] for p in pipelines] if layout.pp > 1 else [[p[0]] for p in pipelines]
    everyone = tuple(range(layout.world))
    return Mesh(
        layout=layout,
        rank=rank,
        at=coordinates(layout, rank),
        clock=clock,
        tp=axis("tp"),
        dp_shard=axis("dp_shard"),
        dp_replicate=axis("dp_replicate"),
        pp=axis("pp"),
        ends=_join(ends, rank, clock),
        world=Axis(everyone, rank, None, clock),
    )


def _join(all_groups: list[list[int]], rank: int, clock: Clock) -> Axis:
    """This rank's group among `all_groups`; a rank in none of them gets an axis of its own."""
    mine = Axis((rank,), 0, None, clock)
    for ranks in all_groups:
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            mine = Axis(tuple(ranks), ranks.index(rank), group, clock)
    return mine
