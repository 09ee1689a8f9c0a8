"""Seconds of collectives over groups of evenly spaced ranks, level by level of the network.

Sizes are per rank. A group is `count` ranks, `stride` chips apart: with tp innermost, then cp, dp
and pp, the dp group of a layout has a stride of tp x cp. Everything broadcasts over candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Link:
    """One level of the network: `size` chips inside a unit of it, one-way bytes/s of each chip into
    it (what is reached, not the nameplate), seconds of one hop of a message."""

    size: ArrayLike
    bandwidth_bytes_s: ArrayLike
    latency_s: ArrayLike


@dataclass(frozen=True)
class Network:
    """Levels, innermost first. The last one joins everything: its size is not looked at."""

    links: tuple[Link, ...]


@dataclass(frozen=True)
class Group:
    """`count` ranks, `stride` chips apart."""

    count: ArrayLike
    stride: ArrayLike


def inside(group: Group, link: Link) -> Floats:
    """Ranks of the group within one unit of `link`."""
    count = np.asarray(group.count, float)
    room = np.asarray(link.size, float) / np.asarray(group.stride, float)
    return np.asarray(np.clip(np.floor(room), 1.0, count))


def _spans(network: Network, group: Group) -> list[tuple[Floats, Floats, Link]]:
    """(Ranks within a unit of the level below, ranks within one of this level, level)."""
    below: Floats = np.ones_like(np.asarray(group.count, float))
    spans = []
    for link in network.links[:-1]:
        here = inside(group, link)
        spans.append((below, here, link))
        below = here
    spans.append((below, np.asarray(group.count, float), network.links[-1]))
    return spans


def ring_s(network: Network, group: Group, gathered_bytes: ArrayLike) -> Floats:
    """All-gather or reduce-scatter whose whole is `gathered_bytes`, as a ring.

    M (n-1)/n bytes pass every link of the ring, and (n-1) hops follow each other. NCCL lays as many
    rings as there are ways out of a unit, so k ranks of the group inside a unit share k of them.
    """
    count = np.asarray(group.count, float)
    volume = np.asarray(gathered_bytes, float) * (count - 1) / count
    wire: Floats = np.zeros_like(volume)
    hops: Floats = np.zeros_like(volume)
    for below, here, link in _spans(network, group):
        crossed = here > below
        speed = np.asarray(link.bandwidth_bytes_s, float) * below
        wire = np.where(crossed, np.maximum(wire, volume / speed), wire)
        units = count / below
        hops = hops + np.where(crossed, (units - count / here) * np.asarray(link.latency_s), 0.0)
    return np.where(count > 1, wire + hops, 0.0)


def all_reduce_s(network: Network, group: Group, size_bytes: ArrayLike) -> Floats:
    """All-reduce of `size_bytes` on each rank: the faster of ring and tree.

    Ring: a reduce-scatter and an all-gather. Double tree: of U units each sends 2 M (U-1)/U bytes,
    hops grow with the logarithm (NCCL's own choice is by the same two terms).
    """
    count = np.asarray(group.count, float)
    ring = 2.0 * ring_s(network, group, size_bytes)
    wire: Floats = np.zeros_like(ring)
    hops: Floats = np.zeros_like(ring)
    for below, here, link in _spans(network, group):
        crossed = here > below
        speed = np.asarray(link.bandwidth_bytes_s, float) * below
        units = here / below
        sent = 2.0 * np.asarray(size_bytes) * (units - 1.0) / units
        wire = np.where(crossed, np.maximum(wire, sent / speed), wire)
        hops = hops + 2.0 * np.log2(units) * np.asarray(link.latency_s)
    return np.where(count > 1, np.minimum(ring, wire + hops), 0.0)


def all_to_all_s(
    network: Network, group: Group, sent_bytes: ArrayLike, copies: ArrayLike = 0.0
) -> Floats:
    """Every rank has `sent_bytes` for the whole group, in equal parts, itself included.

    Pairwise: what leaves a unit goes over the level above at the same time as the rest; starts
    overlap, so that their number counts by its logarithm. Where `copies` > 0, what is sent is that
    many copies of the same data to random ranks, and only one of them travels to each unit (DeepEP,
    HybridEP): of U units a token reaches (U-1)(1 - (1-1/U)^copies) others.
    """
    count = np.asarray(group.count, float)
    sent, many = np.asarray(sent_bytes, float), np.asarray(copies, float)
    total: Floats = np.zeros_like(sent * count)
    for below, here, link in _spans(network, group):
        share = (here - below) / count
        units = here / below
        reached = (units - 1.0) * (1.0 - (1.0 - 1.0 / units) ** many) * here / count
        once = reached / np.maximum(many, 1.0)
        merged = (many > 0) & (below > 1)
        share = np.where(merged, np.minimum(share, once), share)
        wire = sent * share / np.asarray(link.bandwidth_bytes_s, float)
        starts = np.where(here > below, np.log2(np.maximum(units, 1.0)), 0.0)
        total = np.maximum(total, wire) + starts * np.asarray(link.latency_s)
    return np.where(count > 1, total, 0.0)


def send_s(network: Network, stride: ArrayLike, size_bytes: ArrayLike) -> Floats:
    """One message to a rank `stride` chips away."""
    away = np.asarray(stride, float)
    size = np.asarray(size_bytes, float)
    time: Floats = np.zeros_like(away * size)
    reached = np.zeros_like(away, bool)
    for place, link in enumerate(network.links):
        last = place == len(network.links) - 1
        within = (away < np.asarray(link.size)) | last
        here = size / np.asarray(link.bandwidth_bytes_s) + np.asarray(link.latency_s)
        time = np.where(within & ~reached, here, time)
        reached = reached | within
    return time
