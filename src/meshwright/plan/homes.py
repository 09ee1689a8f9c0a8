"""On which member a copy of a rank's state lies: never on the node of the rank itself where there
are others. Pure; ranks, members and nodes are numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


def mirror_keepers(nodes: Sequence[int]) -> dict[int, int]:
    """The rank that mirrors each rank; `nodes` has the node of each.

    Half of the ranks away, so that few keepers change when a rank moves; where that is the rank's
    own node, the rank elsewhere that keeps least, the next one first.
    """
    world = len(nodes)
    usual = {rank: (rank + world // 2) % world for rank in range(world)}
    if len(set(nodes)) == 1:
        return usual
    keepers = {rank: keeper for rank, keeper in usual.items() if nodes[rank] != nodes[keeper]}
    kept = Counter(keepers.values())
    for rank in usual.keys() - keepers.keys():
        after = [(usual[rank] + i) % world for i in range(world)]
        elsewhere = [keeper for keeper in after if nodes[keeper] != nodes[rank]]
        keepers[rank] = min(elsewhere, key=kept.__getitem__)
        kept[keepers[rank]] += 1
    return dict(sorted(keepers.items()))


def deal(
    nodes: Sequence[int],
    spares: Iterable[int],
    node_of: Mapping[int, int],
    dealt: Mapping[int, int],
) -> dict[int, int]:
    """The spare that shadows each rank, where there is any spare.

    `nodes` has the node of each rank, `node_of` that of each spare. Who shadows a rank already
    (`dealt`) goes on, whatever that is; the others get the spare on another node that has least to
    do, and one on their own node where there is no other.
    """
    free = sorted(spares)
    found = {rank: dealt[rank] for rank in range(len(nodes)) if dealt.get(rank) in free}
    load = Counter(found.values())
    for rank in [rank for rank in range(len(nodes)) if free and rank not in found]:
        found[rank] = min(free, key=lambda one: (node_of[one] == nodes[rank], load[one], one))
        load[found[rank]] += 1
    return dict(sorted(found.items()))


def parity_groups(
    stages: Sequence[Sequence[int]], nodes: Sequence[int], most: int
) -> list[tuple[tuple[int, ...], int]]:
    """Groups of ranks, and the rank that keeps each group's parity: outside of it and, as far as
    there are nodes enough, on a node of none of it.

    `stages` are the ranks whose states have one shape. A group takes its ranks from different
    nodes first, at most `most`, and one less than there are ranks or (if several) nodes. None where
    a group would be a rank alone, whose parity is a mirror.
    """
    world, several = len(nodes), len(set(nodes)) > 1
    size = min(most, world - 1, len(set(nodes)) - 1 if several else most)
    shares = [even_shares(len(ranks), size) for ranks in stages]
    if min(map(min, shares)) < 2:
        return []
    kept: Counter[int] = Counter()
    found = []
    for ranks, sizes in zip(stages, shares, strict=True):
        for group in _spread(ranks, nodes, sizes):
            taken = {nodes[rank] for rank in group}
            outside = [rank for rank in range(world) if rank not in group]
            keeper = min(outside, key=lambda one: (nodes[one] in taken, kept[one], -one))
            kept[keeper] += 1
            found.append((group, keeper))
    return found


def even_shares(count: int, most: int) -> list[int]:
    """`count` in as few parts of at most `most` as can be, as even as can be."""
    parts = -(-count // max(most, 1))
    return [count // parts + (i < count % parts) for i in range(parts)]


def _spread(
    ranks: Sequence[int], nodes: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, ...]]:
    """`ranks` in groups of `sizes`, each over as many nodes as there are."""
    left = {node: [r for r in ranks if nodes[r] == node] for node in sorted(set(nodes))}
    groups = []
    for size in sizes:
        group: list[int] = []
        for _ in range(size):
            here = {nodes[rank] for rank in group}
            node = max(left, key=lambda one: (bool(left[one]), one not in here, len(left[one])))
            group.append(left[node].pop(0))
        groups.append(tuple(sorted(group)))
    return groups
