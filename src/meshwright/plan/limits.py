"""Requests that cannot be met: which limit fails first, and the smallest cluster that would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.base.errors import ConfigError
from meshwright.catalog import Cluster
from meshwright.plan.cost.memory import OUTSIDE, memory
from meshwright.plan.search import Found, feasible
from meshwright.plan.search_question import Question

MOST_CHIPS = 2**20
FEWEST_TRIED = 64  # whole nodes tried between a size that is too small and one that will do


@dataclass(frozen=True)
class Refusal:
    """Why nothing can be planned: `limit` in a line, and the smallest cluster found that will do,
    None if none was."""

    limit: str
    smallest: int | None

    def error(self, question: Question) -> ConfigError:
        """As the one line that ends a command."""
        fix = self.limit
        if self.smallest:
            name = question.cluster.name.partition(":")[0]
            fix += f"; the smallest cluster that will do is {name}:{self.smallest}"
        else:
            fix += f"; no cluster of up to {MOST_CHIPS} such chips will do"
        return ConfigError("cluster", question.cluster.name, fix)


def refusal(question: Question, found: Found, resized: Callable[[int], Cluster | None]) -> Refusal:
    """Why `found` is empty. `resized` gives the cluster with another number of chips, None where it
    cannot have that many."""
    return Refusal(limit(question, found), smallest(question, resized))


def limit(question: Question, found: Found) -> str:
    """What stops every layout, in a line."""
    if found.leanest is None:
        reason, count = found.refused.most_common(1)[0]
        return (
            f"no legal layout: {reason} (stops {count} of {found.refused.total()} choices of axes)"
        )
    used = memory(question.work, found.leanest.candidates)
    parts = {name: float(size[0]) for name, size in used.parts.items() if name not in OUTSIDE}
    name = max(parts, key=lambda part: parts[part])
    layout = found.leanest.candidates.layout(0)
    need, have = float(found.leanest.memory_bytes[0]), question.cluster.chip.memory_bytes
    return (
        f"memory: of {found.legal} layouts the leanest, {layout.label} with the deepest "
        f"recomputation, needs {need / 1e9:.1f} of {have / 1e9:.1f} GB a chip (it runs out with a "
        f"probability of {found.leanest.risk[0]:.0%}), {parts[name] / 1e9:.1f} GB of it for {name}"
    )


def smallest(question: Question, resized: Callable[[int], Cluster | None]) -> int | None:
    """The smallest number of chips on which something fits: doubled until it does, then whole
    nodes between; where these are many, evenly spaced ones."""

    def fits(chips: int) -> bool:
        cluster = resized(chips)
        return cluster is not None and feasible(question.on(cluster))

    node = question.cluster.chips_per_node
    high = 1
    while not fits(high):
        high *= 2
        if high > MOST_CHIPS:
            return None
    low = high // 2
    step = max(node, -(-(high - low) // FEWEST_TRIED // node) * node) if high > node else 1
    between = range(low + step - low % step, high, step)
    return next((chips for chips in between if fits(chips)), high)
