"""What the charts of an answer show, whatever draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.plan.explain import TITLES
from meshwright.plan.prediction import GIB, Prediction
from meshwright.plan.scaling import Scaling

COLOURS = {
    "compute": "#3b6ea5",
    "tp": "#d98032",
    "cp": "#c9a227",
    "ep": "#8e5ea2",
    "shard": "#5b9e91",
    "host": "#7f7f7f",
    "bubble": "#c44e52",
    "p2p": "#a0785a",
    "dp": "#6aa84f",
    "optimizer": "#4a4a8a",
    "overhead": "#b0b0b0",
    "data": "#e06377",
}
# Memory has more parts than time.
MORE_COLOURS = (*COLOURS.values(), "#e8a0bf", "#2e7d6b", "#b5651d", "#9fc5e8", "#d4c26a", "#1f2d3d")
LINE, CLIFF = COLOURS["compute"], COLOURS["bubble"]  # of a curve, and of its cliff
NEGLIGIBLE = 0.005  # parts below this share of every bar are not in the legend


@dataclass(frozen=True)
class Part:
    """A piece of a bar; `title` says it in words."""

    name: str
    value: float
    colour: str
    title: str


@dataclass(frozen=True)
class Bar:
    """One layout: its parts from left to right, and the interval around their sum."""

    name: str
    parts: tuple[Part, ...]
    low: float
    high: float


@dataclass(frozen=True)
class Bars:
    """Bars in `unit`; `limit` is a line that none should cross, None without one."""

    title: str
    unit: str
    rows: tuple[Bar, ...]
    limit: float | None = None

    @property
    def most(self) -> float:
        """Where the axis ends."""
        return max(self.limit or 0.0, *(bar.high for bar in self.rows))

    @property
    def legend(self) -> list[Part]:
        """One part of each name that is to be seen in some bar."""
        seen: dict[str, Part] = {}
        for bar in self.rows:
            whole = sum(part.value for part in bar.parts)
            for part in bar.parts:
                if part.value > NEGLIGIBLE * whole:
                    seen.setdefault(part.name, part)
        return list(seen.values())


@dataclass(frozen=True)
class Dot:
    """One size of a scaling curve."""

    chips: int
    efficiency: float
    is_cliff: bool


def time_bars(best: Sequence[Prediction]) -> Bars:
    """Seconds of a step by part."""
    rows = [
        Bar(
            p.name,
            tuple(
                Part(
                    name,
                    max(value, 0.0),
                    COLOURS[name],
                    f"{TITLES[name]}: {value:.3g} s ({value / p.step_time_s:.0%})",
                )
                for name, value in p.time_parts.items()
            ),
            p.step_time_low_s,
            p.step_time_high_s,
        )
        for p in best
    ]
    return Bars("Time of a step", "s", tuple(rows))


def memory_bars(best: Sequence[Prediction]) -> Bars:
    """GiB of the heaviest chip by part, against what the chip has."""
    rows = [
        Bar(
            p.name,
            tuple(
                Part(
                    name,
                    size / GIB,
                    MORE_COLOURS[place % len(MORE_COLOURS)],
                    f"{name}: {size / GIB:.2f} GiB",
                )
                for place, (name, size) in enumerate(p.memory_parts.items())
            ),
            p.memory_low_bytes / GIB,
            p.memory_high_bytes / GIB,
        )
        for p in best
    ]
    capacity = best[0].capacity_bytes / GIB
    return Bars("Memory of the heaviest chip", "GiB", tuple(rows), capacity)


def dots(curve: Scaling) -> list[Dot]:
    """The sizes on which something fits."""
    return [
        Dot(point.chips, point.efficiency, point.chips == curve.cliff)
        for point in curve.points
        if point.efficiency is not None
    ]
