"""The same training on more and more chips: how much faster, and where it stops to pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from typing import Any

from meshwright.catalog import Cluster
from meshwright.plan.explain import TITLES
from meshwright.plan.prediction import Prediction, layout_of, predict
from meshwright.plan.search import search
from meshwright.plan.search_question import Question

CLIFF = 0.8  # of the speed of a chip, that a doubling must keep


@dataclass(frozen=True)
class Point:
    """The best layout on so many chips; None where nothing fits. `efficiency` is the speed of a
    chip over that on the smallest cluster that fits."""

    chips: int
    best: Prediction | None
    efficiency: float | None

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "chips": self.chips,
            "efficiency": self.efficiency,
            "best": self.best and self.best.document(),
        }


@dataclass(frozen=True)
class Scaling:
    """Points by size; `cliff` is the size at which a chip first loses more than a fifth of its
    speed for twice as many of them, None if it never does; `reason` in a line."""

    points: tuple[Point, ...]
    cliff: int | None
    reason: str

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        points = [point.document() for point in self.points]
        return {"points": points, "cliff": self.cliff, "reason": self.reason}


def scaling(question: Question, clusters: Sequence[Cluster]) -> Scaling:
    """The best layout on each of `clusters`, at the same global batch."""
    points: list[Point] = []
    first: Prediction | None = None
    for _, cluster in sorted({one.chips: one for one in clusters}.items()):
        there = question.on(cluster)
        found = search(there)
        best = None
        if len(found.best):
            best = predict(there, layout_of(there, found.best.candidates, 0))
            first = first or best
        speed = None
        if best and first:
            speed = best.tokens_per_s_per_chip / first.tokens_per_s_per_chip
        points.append(Point(cluster.chips, best, speed))
    return _named(question, tuple(points))


def _named(question: Question, points: tuple[Point, ...]) -> Scaling:
    fitting = [point for point in points if point.best]
    if not fitting:
        return Scaling(points, None, "nothing fits on any of these")
    steps = [(kept(before, after), before, after) for before, after in pairwise(fitting)]
    for share, before, after in steps:
        if share < CLIFF:
            return Scaling(points, after.chips, _why(question, before, after))
    if fitting[-1].chips < points[-1].chips:
        gone = next(p.chips for p in points if p.chips > fitting[-1].chips)
        batch = question.global_batch
        why = f"no layout at {gone} chips: a global batch of {batch} does not fill them"
        return Scaling(points, gone, why)
    reason = "no cliff: a chip keeps four fifths of its speed at every doubling"
    if steps:
        _, before, after = min(steps, key=lambda step: step[0])
        reason += f"; most is lost {_why(question, before, after)}"
    return Scaling(points, None, reason)


def kept(before: Point, after: Point) -> float:
    """Share of the speed of a chip that is left for each doubling from one point to the other."""
    assert before.best and after.best
    share = after.best.tokens_per_s_per_chip / before.best.tokens_per_s_per_chip
    return float(share ** (1 / log2(after.chips / before.chips)))


def _why(question: Question, before: Point, after: Point) -> str:
    """The part whose share of the step grows most."""
    assert before.best and after.best
    shares = {
        name: after.best.time_parts[name] / after.best.step_time_s
        - before.best.time_parts[name] / before.best.step_time_s
        for name in TITLES
        if name != "compute"
    }
    name = max(shares, key=lambda part: shares[part])
    count = question.global_batch / after.chips
    share = after.best.tokens_per_s_per_chip / before.best.tokens_per_s_per_chip
    few = f"; {count:.2g} sequences a chip are left" if count < 4 else ""
    return (
        f"from {before.chips} to {after.chips} chips, where a chip keeps {share:.0%} of its speed: "
        f"{TITLES[name]} grows by {shares[name]:.0%} of the step{few}"
    )
