"""Which rank sits on which chip: the order of the axes over the levels of the network.

The chip number is a mixed radix of the coordinates; the search tries every order of the axes,
with axes cut in two where a unit of the network or a dimension of a torus ends, and keeps the one
whose traffic takes the fewest seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.base.errors import ConfigError, did_you_mean
from meshwright.catalog.hardware import Cluster
from meshwright.plan.layout import AXES, Axis, Layout
from meshwright.plan.mapping_cost import Digits, GroupCost, Traffic, group_cost
from meshwright.plan.mapping_cost import Pattern as Pattern

Group = Literal["tp", "cp", "dp_shard", "dp_replicate", "pp", "dp", "fsdp", "ep"]

_FOLDED_PIECES = 4  # with more, two cuts make too many orders for an answer in a second

# Axes that the members of a group differ in; those of ep follow from the layout.
_GROUPS: Mapping[str, tuple[Axis, ...]] = {
    **{axis: (axis,) for axis in AXES},
    "dp": ("dp_shard", "dp_replicate"),
    "fsdp": ("cp", "dp_shard"),
}


@dataclass(frozen=True)
class Piece:
    """Part of an axis: the digit `coordinate // step % size`. `ep`: its ranks share experts out."""

    axis: Axis
    size: int
    step: int
    ep: bool

    @property
    def label(self) -> str:
        """`tp8`; `dp_shard8/2` is what an axis has left above its first 2 coordinates."""
        return f"{self.axis}{self.size}" + (f"/{self.step}" if self.step > 1 else "")


@dataclass(frozen=True)
class Place:
    """Where a rank sits: `units` are the numbers of its unit on each level, outwards; `torus` its
    coordinates where the innermost level is a torus."""

    chip: int
    node: int
    slot: int
    units: tuple[int, ...]
    torus: tuple[int, ...]


@dataclass(frozen=True)
class RankMap:
    """`order` from innermost; `placements` for each kind of traffic: level, seconds, bandwidth."""

    layout: Layout
    cluster: Cluster
    order: tuple[Piece, ...]
    placements: Mapping[str, GroupCost]

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of each kind of traffic; they add up to `seconds`."""
        return {name: cost.seconds for name, cost in self.placements.items()}

    @property
    def seconds(self) -> float:
        """The score: seconds of traffic of a step if nothing overlapped."""
        return sum(self.terms.values())

    @cached_property
    def chips(self) -> NDArray[np.int64]:
        """Chip of every rank."""
        ranks = np.arange(self.layout.world)
        coordinate, stride = {}, 1
        for axis in reversed(AXES):
            coordinate[axis] = ranks // stride % getattr(self.layout, axis)
            stride *= getattr(self.layout, axis)
        chips, stride = np.zeros_like(ranks), 1
        for piece in self.order:
            chips = chips + coordinate[piece.axis] // piece.step % piece.size * stride
            stride *= piece.size
        return chips

    def chip_of(self, rank: int) -> int:
        """The chip that `rank` runs on."""
        return int(self.chips[rank])

    def coordinates(self, rank: int) -> Place:
        """Where `rank` sits in the cluster."""
        chip = self.chip_of(rank)
        node, slot = divmod(chip, self.cluster.chips_per_node)
        units = tuple(chip // level.size for level in self.cluster.levels)
        shape = self.cluster.levels[0].shape
        torus = np.unravel_index(chip % prod(shape), shape) if shape else ()
        return Place(chip, node, slot, units, tuple(int(place) for place in torus))


def map_ranks(layout: Layout, cluster: Cluster, traffic: Mapping[str, Traffic]) -> RankMap:
    """The cheapest mapping; of equal ones that which is nearest to the order of the ranks.

    `traffic` by group: an axis, `dp` (both dp axes), `fsdp` (dp_shard x cp) or `ep`. Raises
    ConfigError if the layout needs more chips than there are, or a group is unknown.
    """
    if layout.world > cluster.chips:
        fix = f"{layout.label} needs {layout.world} chips, {cluster.name} has {cluster.chips}"
        raise ConfigError("layout", layout.label, fix)
    known = [*_GROUPS, "ep"]
    for name in traffic:
        if name not in known:
            hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
            raise ConfigError("traffic", name, "no such group" + hint)
    search = _Search(layout.world, cluster, traffic)
    for pieces in _cuts(layout, cluster):
        search.run(pieces)
    return RankMap(layout, cluster, search.best, search.placements(search.best))


def ranks_in_order(layout: Layout, cluster: Cluster, traffic: Mapping[str, Traffic]) -> RankMap:
    """Rank i on chip i, scored like any other: what a launcher does that knows no better."""
    order = _pieces(layout)
    search = _Search(layout.world, cluster, traffic)
    return RankMap(layout, cluster, order, search.placements(order))


def _pieces(layout: Layout) -> tuple[Piece, ...]:
    """The axes from the fastest, the one that the group of ep ends in cut there."""
    found: list[Piece] = []
    left = layout.ep
    for axis in reversed(AXES):
        size = getattr(layout, axis)
        shares = axis != "pp" and not (axis == "tp" and layout.etp == layout.tp)
        part = gcd(size, left) if shares and left > 1 else 1
        if part > 1:
            found.append(Piece(axis, part, 1, ep=True))
            left //= part
        found.append(Piece(axis, size // part, part, ep=False))
    return tuple(piece for piece in found if piece.size > 1)


def _cuts(layout: Layout, cluster: Cluster) -> Iterator[tuple[Piece, ...]]:
    """The pieces as they are, then with one of them cut where a unit or a dimension may end. To
    fold an axis over two dimensions of a torus takes a second cut, in the axis it goes around."""
    whole = _pieces(layout)
    yield whole
    ends = {cluster.levels[0].size, *(n for level in cluster.levels for n in level.shape)}
    once = list(_cut_once(whole, ends))
    yield from once
    if cluster.levels[0].shape and len(whole) <= _FOLDED_PIECES:
        for pieces in once:
            yield from _cut_once(pieces, ends)


def _cut_once(whole: tuple[Piece, ...], ends: set[int]) -> Iterator[tuple[Piece, ...]]:
    for place, piece in enumerate(whole):
        for part in range(2, piece.size):
            if piece.size % part == 0 and any(end % part == 0 for end in ends):
                low = Piece(piece.axis, part, piece.step, piece.ep)
                high = Piece(piece.axis, piece.size // part, piece.step * part, piece.ep)
                yield (*whole[:place], low, high, *whole[place + 1 :])


class _Search:
    """Depth first over orders from the innermost piece; a group is priced as soon as all of it is
    placed, and a branch ends when it costs as much as the best order known."""

    def __init__(self, world: int, cluster: Cluster, traffic: Mapping[str, Traffic]) -> None:
        self.world, self.cluster, self.traffic = world, cluster, traffic
        self.best: tuple[Piece, ...] = ()
        self.best_s = float("inf")
        self._priced: dict[tuple[str, Digits], GroupCost] = {}

    def run(self, pieces: tuple[Piece, ...]) -> None:
        """Try every order of `pieces` in which the low part of an axis stands inside the high."""
        members = {name: _members(name, pieces) for name in self.traffic}
        self._extend((), {}, pieces, members, 0.0)

    def _extend(
        self,
        order: tuple[Piece, ...],
        strides: dict[Piece, int],
        left: tuple[Piece, ...],
        members: Mapping[str, frozenset[Piece]],
        cost_s: float,
    ) -> None:
        if not left:
            self.best, self.best_s = order, cost_s
            return
        stride = prod(piece.size for piece in order)
        for place, piece in enumerate(left):
            if any(other.axis == piece.axis for other in left[:place]):
                continue
            placed = {**strides, piece: stride}
            total_s = cost_s + sum(
                self._price(name, placed, group).seconds
                for name, group in members.items()
                if piece in group and group <= placed.keys()
            )
            # Less by more than rounding: among equals the first order found stays.
            if total_s < self.best_s * (1 - 1e-9) or not self.best:
                rest = left[:place] + left[place + 1 :]
                self._extend((*order, piece), placed, rest, members, total_s)

    def _price(self, name: str, strides: Mapping[Piece, int], group: frozenset[Piece]) -> GroupCost:
        digits = tuple(sorted((strides[piece], piece.size) for piece in group))
        if (name, digits) not in self._priced:
            cost = group_cost(self.cluster, self.world, digits, self.traffic[name])
            self._priced[name, digits] = cost
        return self._priced[name, digits]

    def placements(self, order: tuple[Piece, ...]) -> dict[str, GroupCost]:
        """The cost of each kind of traffic in `order`."""
        strides, stride = {}, 1
        for piece in order:
            strides[piece] = stride
            stride *= piece.size
        return {name: self._price(name, strides, _members(name, order)) for name in self.traffic}


def _members(name: str, pieces: tuple[Piece, ...]) -> frozenset[Piece]:
    if name == "ep":
        return frozenset(piece for piece in pieces if piece.ep)
    return frozenset(piece for piece in pieces if piece.axis in _GROUPS[name])
