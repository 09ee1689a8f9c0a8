"""Seconds that the traffic of one group of ranks takes, by where its chips stand.

A group is digits of the chip number: (stride, size) pairs, its members are the sums of their
multiples, and all other digits tell its copies apart, which all talk at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

import numpy as np

from meshwright.catalog.hardware import Cluster, Level

Digits = tuple[tuple[int, int], ...]
Pattern = Literal["ring", "all_to_all", "p2p"]


@dataclass(frozen=True)
class Traffic:
    """What each rank of a group sends in a step: bytes, in how many collectives or messages.

    `ring`: all to the next rank, as in all-gather and reduce-scatter (for a gathered M:
    M (n-1)/n). `all_to_all`: in equal parts to the others. `p2p`: to the next rank of a line.
    """

    bytes: float
    pattern: Pattern
    messages: int = 0


@dataclass(frozen=True)
class GroupCost:
    """`level` is the outermost that the group crosses, `slowest` the one that sets the pace;
    `bandwidth_bytes_s` is what each rank reaches in sending, start-up time not counted."""

    level: str
    slowest: str
    seconds: float
    latency_s: float
    bandwidth_bytes_s: float


@dataclass(frozen=True)
class _Line:
    """A group along one dimension of a torus: members, steps from one to the next, ring or not."""

    dimension: int
    members: int
    step: int
    closed: bool


def merged(digits: Digits) -> Digits:
    """The same group in as few digits as possible, by stride: 2 then 4 side by side are an 8."""
    found: list[tuple[int, int]] = []
    for stride, size in sorted(digits):
        if found and stride == found[-1][0] * found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] * size)
        elif size > 1:
            found.append((stride, size))
    return tuple(found)


def spread(digits: Digits, world: int, unit: int) -> tuple[int, int]:
    """(Units of `unit` chips that a group touches, its members in the emptiest of them), the worst
    of all copies of the group, exact also where digits and units do not divide each other."""
    if all(_aligned(stride, size, unit) for stride, size in digits):
        units = prod(
            size if stride >= unit else -(-stride * size // unit) for stride, size in digits
        )
        return units, prod(size for _, size in digits) // units
    return _counted_spread(digits, world, unit)


def _aligned(stride: int, size: int, unit: int) -> bool:
    """Whether every copy of the digit lies the same way in the units: in one of them, cut by their
    ends, or a whole number of them apart."""
    if stride >= unit:
        return stride % unit == 0
    end = stride * size
    return unit % end == 0 or (unit % stride == 0 and end % unit == 0)


def _counted_spread(digits: Digits, world: int, unit: int) -> tuple[int, int]:
    """`spread` by looking: only where the first chip of a copy stands inside a unit matters, so
    that many copies are looked at."""
    starts, offsets = np.zeros(1, int), np.zeros(1, int)
    end = 1
    for stride, size in (*digits, (world, 1)):
        steps = np.arange(min(stride // end, unit)) * end
        starts = np.unique(np.add.outer(steps, starts) % unit)
        offsets = np.add.outer(np.arange(size) * stride, offsets).ravel()
        end = stride * size
    units = (starts[:, None] + offsets) // unit
    widest = int(units.max()) + 1
    rows = np.arange(len(starts))[:, None] * widest
    counts = np.bincount((rows + units).ravel(), minlength=len(starts) * widest)
    counts = counts.reshape(len(starts), widest)
    return int((counts > 0).sum(axis=1).max()), int(counts[counts > 0].min())


def group_cost(cluster: Cluster, world: int, digits: Digits, traffic: Traffic) -> GroupCost:
    """Seconds of `traffic` in every copy of the group at once.

    Levels work at the same time, so the slowest one sets the pace. A chip has its own way out of
    each unit: k members inside a unit leave it over k ways, whichever other groups stand beside.
    """
    digits = merged(digits)
    count = prod(size for _, size in digits)
    cost = GroupCost(cluster.levels[0].name, cluster.levels[0].name, 0.0, 0.0, float("inf"))
    if count == 1:
        return cost
    wire, latency, slowest, reached = 0.0, 0.0, cost.level, cost.level
    touched, inside, below = count, 1, 1
    for level in cluster.levels:
        last = level is cluster.levels[-1]
        touches, members = (1, count) if last else spread(digits, world, level.size)
        if touched > touches:
            here = _wire_s(level, digits, below, (count, inside, members), traffic)
            reached = level.name
            # A message from one rank to the next takes one way only, that of the outermost level.
            if here > wire or traffic.pattern == "p2p":
                wire, slowest = here, level.name
            hop = level.latency_s * traffic.messages
            latency = _hops(latency, hop, touched - touches, traffic.pattern)
        touched, inside, below = touches, members, level.size
    bandwidth = traffic.bytes / wire if wire else float("inf")
    return GroupCost(reached, slowest, wire + latency, latency, bandwidth)


def _hops(before: float, hop: float, steps: int, pattern: Pattern) -> float:
    """Start-up time: a ring takes its steps one after the other, a message one, an all-to-all one
    on each level."""
    if pattern == "ring":
        return before + hop * steps
    return hop if pattern == "p2p" else before + hop


def _wire_s(
    level: Level, digits: Digits, below: int, counts: tuple[int, int, int], traffic: Traffic
) -> float:
    """Seconds that `level` needs; `counts`: members of the group, in a unit below, in one here."""
    count, inside, members = counts
    lines = _lines(level, digits, below)
    if traffic.pattern == "ring":
        return traffic.bytes / (inside * _ring_rate(level, lines, members // inside))
    if traffic.pattern == "p2p":
        return traffic.bytes / _message_rate(level, lines)
    leaving = traffic.bytes * (members - inside) / (count - 1)
    return leaving / _exchange_rate(level, lines, members // inside)


def _ring_rate(level: Level, lines: list[_Line], peers: int) -> float:
    """Bytes/s at which a chip passes on what it has. On a torus rings run over all dimensions of
    the group at once: both ways around where it closes, out and back where not, and `step` groups
    that interleave share the links. Two lines of one dimension would share them too: one counts."""
    if lines:
        best: dict[int, float] = {}
        for line in lines:
            rate = (2 if line.closed else 1) / line.step
            best[line.dimension] = max(rate, best.get(line.dimension, 0.0))
        return level.link_bytes_s * sum(best.values())
    if level.kind == "mesh":
        return level.link_bytes_s * max(peers - 1, 1)
    return level.bandwidth_bytes_s


def _exchange_rate(level: Level, lines: list[_Line], peers: int) -> float:
    """Bytes/s at which a chip sends to all others. On a torus the cut in the middle of a dimension
    decides: n/2 chips of a line send half of it across, over two links where it closes."""
    if not lines:
        return _ring_rate(level, lines, peers)
    total = prod(line.members for line in lines)
    to_others = total / (total - 1)
    load: dict[int, float] = {}
    for line in lines:
        cut = line.step * line.members / (8 if line.closed else 4)
        load[line.dimension] = load.get(line.dimension, 0.0) + cut
    return level.link_bytes_s / (max(load.values()) * to_others)


def _message_rate(level: Level, lines: list[_Line]) -> float:
    """Bytes/s of messages from each rank to the next. On a torus they share links with the groups
    they pass; at the end of an open dimension the next rank is all the way back."""
    if not lines:
        return level.link_bytes_s
    ends = [line.step * (1 if line.closed else line.members - 1) for line in lines[:-1]]
    return level.link_bytes_s / max([line.step for line in lines] + ends)


def _lines(level: Level, digits: Digits, below: int) -> list[_Line]:
    """The group along each dimension of a torus, innermost first; empty for other wirings."""
    found = []
    inner = below
    for dimension, extent in reversed(list(enumerate(level.shape))):
        for stride, size in digits:
            low, high = max(stride, inner), min(stride * size, inner * extent)
            if high > low:
                members, step = ceil(high / low), ceil(low / inner)
                closed = level.wraps[dimension] and members * step == extent and high % low == 0
                found.append(_Line(dimension, members, step, closed))
        inner *= extent
    return found
