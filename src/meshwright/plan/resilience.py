"""Which rank keeps what of another, so that a chip that dies takes nothing with it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from meshwright.base.errors import ConfigError
from meshwright.plan.layout import Axis, Layout, expert_groups, groups

Redundancy = Literal["auto", "none", "twin", "mirror", "shadow", "parity"]
BYTES_KEPT = 16  # per fp32 parameter of a mirrored rank: master, two moments, the step's gradient


@dataclass(frozen=True)
class Keeping:
    """Where the state of each rank is besides on itself.

    `twins`: the ranks that hold the same anyway. `keepers`: the rank that keeps a copy in its
    host's memory; none where twins are enough.
    """

    kind: Literal["none", "twin", "mirror"]
    twins: tuple[tuple[int, ...], ...]
    keepers: Mapping[int, int]

    def wards(self, keeper: int) -> tuple[int, ...]:
        """The ranks whose state `keeper` keeps."""
        return tuple(ward for ward, kept_by in self.keepers.items() if kept_by == keeper)

    def source(self, rank: int, kept: Mapping[int, Collection[int]]) -> int | None:
        """Who can give `rank` its state. `kept` has the ranks that have their own, each with the
        wards whose copies it holds whole. None: the state is lost."""
        twin = next((twin for twin in self.twins[rank] if twin in kept), None)
        keeper = self.keepers.get(rank)
        if twin is not None or keeper is None:
            return twin
        return keeper if rank in kept.get(keeper, ()) else None


def check_survivable(layout: Layout) -> None:
    """Refuse what a rank learns and nobody else can be given. Raises ConfigError."""
    if layout.rebalance_above:
        fix = "experts that move are not kept elsewhere yet; set it to 0, or redundancy to none"
        raise ConfigError("layout.rebalance_above", layout.rebalance_above, fix)
    if layout.grad_compression == "int8":
        fix = "what int8 loses is kept on one rank alone; use fp8, or set redundancy to none"
        raise ConfigError("layout.grad_compression", layout.grad_compression, fix)


def keeping(layout: Layout, kind: Redundancy, experts: bool) -> Keeping:
    """How `kind` is done on `layout`; `experts`: the model has some.

    "auto" takes twins where every rank has one, else mirrors, and nothing for a single rank. A
    mirror is half of the ranks away, so that it is on another node wherever a node has at most half
    of them. Raises ConfigError where it cannot be done.
    """
    alike = tuple(twins(layout, experts))
    if kind == "auto":
        alone: Redundancy = "none" if layout.world == 1 else "mirror"
        kind = "twin" if all(alike) else alone
    if kind == "none":
        return Keeping("none", alike, {})
    if kind == "twin":
        if not all(alike):
            fix = f"rank {alike.index(())} of {layout.label} has no twin; use mirror"
            raise ConfigError("resilience.redundancy", kind, fix)
        return Keeping("twin", alike, {})
    if kind != "mirror":
        raise ConfigError("resilience.redundancy", kind, "not in this version; use mirror")
    if layout.world == 1:
        fix = "a single rank has no other to keep its state; use none"
        raise ConfigError("resilience.redundancy", kind, fix)
    away = layout.world // 2
    keepers = {rank: (rank + away) % layout.world for rank in range(layout.world)}
    return Keeping("mirror", alike, keepers)


def twins(layout: Layout, experts: bool) -> list[tuple[int, ...]]:
    """For each rank the others that hold the same masters and moments, in order; experts have
    replicas of their own."""
    over: tuple[Axis, ...] = ("dp_replicate",)
    if not layout.zero_stage:
        over = ("dp_replicate", "dp_shard", "cp")
    alike = _companions(groups(layout, *over))
    if experts:
        of_experts = _companions(expert_groups(layout, "replicas"))
        alike = {rank: ranks & of_experts[rank] for rank, ranks in alike.items()}
    return [tuple(sorted(alike[rank] - {rank})) for rank in range(layout.world)]


def blocks(layout: Layout, experts: bool) -> tuple[frozenset[int], ...]:
    """The ranks that a rank talks to while it works on a step, for each rank: one replica of the
    model. What it has computed stays good when a rank of another block is lost.

    A single block is none: `()`. So it is where gradients are cut or compressed on their way, which
    leaves something behind.
    """
    if layout.dp_replicate == 1 or layout.domain or layout.grad_compression != "none":
        return ()
    within: tuple[Axis, ...] = ("tp", "cp", "pp", *(("dp_shard",) if layout.zero_stage else ()))
    linked = groups(layout, *within)
    if experts:
        linked += [*expert_groups(layout, "ep"), *expert_groups(layout, "shards")]
    found = _joined(linked, layout.world)
    return found if len(set(found)) > 1 else ()


def _joined(linked: list[list[int]], world: int) -> tuple[frozenset[int], ...]:
    """For each rank those that it can reach over the groups `linked`."""
    reach = [frozenset({rank}) for rank in range(world)]
    for ranks in linked:
        whole = frozenset().union(*(reach[rank] for rank in ranks))
        for rank in whole:
            reach[rank] = whole
    return tuple(reach)


def _companions(found: list[list[int]]) -> dict[int, frozenset[int]]:
    return {rank: frozenset(ranks) for ranks in found for rank in ranks}
