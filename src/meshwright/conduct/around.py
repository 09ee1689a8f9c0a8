"""How ranks get out of the way of links that are slow or cut: pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

Ends = tuple[int, int]


def behind(node: int, nodes: Collection[int], bad: Collection[Ends]) -> bool:
    """Whether a bad link is between `node` and one of `nodes`."""
    return any(node in ends and set(ends) - {node} & set(nodes) for ends in bad)


def beside(table: Sequence[int], node_of: Mapping[int, int], bad: Collection[Ends]) -> list[int]:
    """The nodes that ranks could leave so as not to need bad links, the best first: the one that
    most of them lead to, then the one with the fewest ranks."""
    ranks = [node_of[member] for member in table]
    crossed = [ends for ends in bad if set(ends) <= set(ranks)]
    nodes = {node for ends in crossed for node in ends}

    def order(node: int) -> tuple[int, int, int]:
        return -sum(node in ends for ends in crossed), ranks.count(node), node

    return sorted(nodes, key=order)


def around(
    table: Sequence[int],
    node_of: Mapping[int, int],
    bad: Collection[Ends],
    ready: Sequence[int],
    shadows: Mapping[int, int] | None = None,
) -> dict[int, int] | None:
    """By rank, the members of `ready` that can take all ranks of one node, and have no bad link to
    those that stay; none where no rank needs a bad link, None where they are too few. With
    `shadows`, by rank, only who shadows a rank has its state."""
    nodes = beside(table, node_of, bad)
    for node in nodes:
        ranks = [rank for rank, member in enumerate(table) if node_of[member] == node]
        stay = {node_of[member] for member in table} - {node}
        fit = [m for m in ready if node_of[m] != node and not behind(node_of[m], stay, bad)]
        if shadows:
            found = {rank: shadows[rank] for rank in ranks if shadows.get(rank) in fit}
            if len(set(found.values())) == len(ranks):
                return found
        elif len(fit) >= len(ranks):
            return dict(zip(ranks, fit, strict=False))
    return None if nodes else {}
