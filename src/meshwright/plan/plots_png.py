"""The charts of an answer as one PNG. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.base.errors import ConfigError
from meshwright.plan.plots_data import CLIFF, LINE, Bars, dots, memory_bars, time_bars
from meshwright.plan.prediction import Prediction
from meshwright.plan.scaling import Scaling

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, ROW_IN, FRAME_IN, CURVE_IN = 10.0, 0.5, 1.8, 3.0
DPI = 120


def check(path: Path) -> None:
    """Raises ConfigError if nothing is installed that could draw `path`."""
    if find_spec("matplotlib") is None:
        fix = "PNG needs matplotlib: pip install 'meshwright[plots]', or name the file .html"
        raise ConfigError("plot", str(path), fix)


def save(path: Path, title: str, best: Sequence[Prediction], curve: Scaling | None = None) -> None:
    """Write the charts of time and memory, and the curve if there is one, to `path`.

    Raises ConfigError without matplotlib.
    """
    check(path)
    # Only who wants a PNG pays for the import; the plain Agg canvas needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts = [time_bars(best), memory_bars(best)]
    heights = [FRAME_IN + ROW_IN * len(bars.rows) for bars in charts]
    points = dots(curve) if curve else []
    heights += [CURVE_IN] if points else []
    figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for bars, place in zip(charts, axes, strict=False):
        _bars(place, bars)
    if curve and points:
        _curve(axes[-1], curve)
    figure.savefig(path, dpi=DPI, format="png")


def _bars(axes: Axes, bars: Bars) -> None:
    named: set[str] = set()
    shown = {part.name for part in bars.legend}
    for row, bar in enumerate(bars.rows):
        left = 0.0
        for part in bar.parts:
            label = part.name if part.name in shown - named else None
            named.add(part.name)
            axes.barh(row, part.value, left=left, color=part.colour, label=label, height=0.6)
            left += part.value
        axes.plot([bar.low, bar.high], [row + 0.4] * 2, color="#222", linewidth=1.5)
    if bars.limit is not None:
        axes.axvline(bars.limit, color="#c00")
    axes.set_yticks(range(len(bars.rows)), [bar.name for bar in bars.rows])
    axes.invert_yaxis()
    axes.set_xlim(0.0, bars.most * 1.02)
    axes.set_xlabel(bars.unit)
    axes.set_title(bars.title, loc="left")
    below = (0.4, -0.25)
    axes.legend(loc="upper center", bbox_to_anchor=below, ncols=6, fontsize="small", frameon=False)


def _curve(axes: Axes, curve: Scaling) -> None:
    points = dots(curve)
    chips, kept = [dot.chips for dot in points], [dot.efficiency for dot in points]
    axes.plot(chips, kept, color=LINE)
    axes.scatter(chips, kept, color=[CLIFF if dot.is_cliff else LINE for dot in points], zorder=3)
    for dot in points:
        where = (dot.chips, dot.efficiency)
        axes.annotate(
            f"{dot.efficiency:.0%}", where, (0, 7), textcoords="offset points", ha="center"
        )
    axes.set_xscale("log")
    axes.set_xticks(chips, [str(n) for n in chips])
    axes.minorticks_off()
    axes.set_ylim(0.0, max(kept) * 1.2)
    axes.set_xlabel("chips")
    axes.set_title(f"Scaling: {curve.reason}", loc="left", fontsize="small", wrap=True)
