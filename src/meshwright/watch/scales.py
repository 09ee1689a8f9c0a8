"""Axes of the charts: where a value stands, which ticks to draw, which points to keep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`, linear or logarithmic (`low` > 0)."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where `value` stands: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def shows(self, value: float) -> bool:
        """Whether `value` has a place on this axis at all."""
        return math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self, about: int) -> list[float]:
        """Round values on the axis, some `about` of them."""
        if self.log:
            return log_ticks(self.low, self.high)
        return nice_ticks(self.low, self.high, about)


def fit_scale(values: Iterable[float], *, log: bool = False, from_zero: bool = False) -> Scale:
    """A scale around the finite `values` with a little room; 0 to 1 if there are none."""
    usable = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not usable:
        return Scale(0.1, 1.0, log=True) if log else Scale(0.0, 1.0)
    low, high = min(usable), max(usable)
    if log:
        return Scale(low / 1.15, high * 1.15, log=True)
    if from_zero and low >= 0:
        return Scale(0.0, 1.12 * high or 1.0)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return Scale(low - room, high + room)


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Multiples of 1, 2 or 5 x 10^n within [low, high]: at most `about` + 1 of them."""
    rough = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high], with 2 and 5 between them below three decades."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    between = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    every = [m * 10.0**decade for decade in decades for m in between]
    return [float(f"{tick:.12g}") for tick in every if low <= tick <= high]


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Some `limit` of `points`, in order.

    Each stretch keeps its lowest and its highest, so no spike is lost, and its first that is not
    finite, so no gap is."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept: set[int] = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        finite = [index for index in stretch if math.isfinite(points[index][1])]
        by_height = sorted(finite or stretch, key=lambda index: points[index][1])
        kept.update((by_height[0], by_height[-1]))
        kept.update(_first_gap(points, stretch))
    return [points[index] for index in sorted(kept)]


def _first_gap(points: Sequence[Point], stretch: range) -> list[int]:
    return [index for index in stretch if not math.isfinite(points[index][1])][:1]
