"""Inline SVG charts: pure functions from numbers to markup.

An `<svg>` here is the plot area itself, as wide as its container; ticks overflow into its margins
(see report.css). Positions are percentages and text is in pixels, so that a chart keeps readable
text at any width without a script. Curves live in a nested `<svg>` that stretches, with strokes
that do not. Colours are slots of the style sheet, which has a light and a dark set. `Markup.format`
escapes every value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from meshwright.watch.formats import duration, ordinary, percent
from meshwright.watch.scales import Point, Scale, fit_scale, nice_ticks, thin

_UNITS = 1000  # width and height of the nested svg that curves are drawn in
_CURVE_POINTS = 600
_HOVER_BANDS = 160


@dataclass(frozen=True)
class Series:
    """A named curve; `dots` marks each point, for curves with few."""

    name: str
    points: tuple[Point, ...]
    slot: int
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Reference:
    """A level to compare with: a dashed line across the chart with its name on it."""

    name: str
    level: float
    slot: int


@dataclass(frozen=True)
class Bar:
    """One bar: a label and the seconds of each part."""

    label: str
    seconds: tuple[float, ...]


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    references: Sequence[Reference] = (),
    marks: Sequence[tuple[float, str]] = (),
    log: bool = False,
    from_zero: bool = False,
) -> Markup:
    """Curves over a common x (the step). `marks` are named vertical lines.

    Points that are not finite (or not positive, with `log`) leave a gap and are told on hovering.
    """
    points = [point for one in series for point in one.points]
    x = fit_x([px for px, _ in points])
    levels = [reference.level for reference in references]
    y = fit_scale([*(py for _, py in points), *levels], log=log, from_zero=from_zero)
    body = [
        _grid(x, y),
        *(_mark(x, at, name) for at, name in marks if x.low <= at <= x.high),
        *(_reference(reference, y) for reference in references if y.shows(reference.level)),
        *(_curve(one, x, y) for one in series),
        *(_reference_name(one, series, y) for one in references if y.shows(one.level)),
        _hover_bands(series, x),
        *(_dots(one, x, y) for one in series),
    ]
    return plot("line", label, body)


def fit_x(values: Sequence[float]) -> Scale:
    """The x axis: exactly from the first to the last value."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return Scale(low, high) if high > low else Scale(low - 0.5, low + 0.5)


def plot(kind: str, label: str, body: Iterable[Markup], height_px: int | None = None) -> Markup:
    """The plot area of one chart of the style-sheet class `kind`, around `body`."""
    style = Markup(' style="height:{}px"').format(height_px) if height_px else Markup("")
    opening = Markup('<svg class="plot {}" role="img" aria-label="{}"{}>')
    return opening.format(kind, label, style) + Markup("").join(body) + Markup("</svg>")


def _grid(x: Scale, y: Scale) -> Markup:
    horizontal = Markup(
        '<line class="grid" x1="0" x2="100%" y1="{0:.2f}%" y2="{0:.2f}%"/>'
        '<text class="tick y" x="0" dx="-8" y="{0:.2f}%" dy=".35em">{1}</text>'
    )
    vertical = Markup(
        '<line class="axis" x1="{0:.2f}%" x2="{0:.2f}%" y1="100%" y2="100%"/>'
        '<text class="tick x" x="{0:.2f}%" y="100%" dy="18">{1}</text>'
    )
    return Markup("").join(
        [
            *(horizontal.format(_down(y, tick), ordinary(tick)) for tick in y.ticks(5)),
            *(vertical.format(100 * x.share(tick), ordinary(tick)) for tick in _whole(x)),
            Markup('<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>'),
        ]
    )


def _whole(x: Scale) -> list[float]:
    """Ticks of an axis of steps: a step and a half does not exist."""
    return [tick for tick in x.ticks(6) if tick == int(tick)]


def _down(y: Scale, value: float) -> float:
    """Percent from the top."""
    return 100 * (1 - y.share(value))


def _mark(x: Scale, at: float, name: str) -> Markup:
    return Markup(
        '<line class="mark" x1="{0:.2f}%" x2="{0:.2f}%" y1="0" y2="100%"><title>{1}</title></line>'
        '<text class="mark-name" x="{0:.2f}%" dx="4" y="0" dy="10">{1}</text>'
    ).format(100 * x.share(at), name)


def _reference(reference: Reference, y: Scale) -> Markup:
    return Markup(
        '<line class="reference s{0}" x1="0" x2="100%" y1="{1:.2f}%" y2="{1:.2f}%"/>'
    ).format(reference.slot, _down(y, reference.level))


def _reference_name(reference: Reference, series: Sequence[Series], y: Scale) -> Markup:
    """At the right end, on the side of the line where the curves end not, if there is room."""
    ends = [one.points[-1][1] for one in series if one.points and y.shows(one.points[-1][1])]
    below = bool(ends) and min(ends) > reference.level and y.share(reference.level) > 0.1
    pattern = Markup('<text class="reference-name" x="100%" y="{:.2f}%" dy="{}">{}</text>')
    text = f"{reference.name} {reference.level:.3f}"
    return pattern.format(_down(y, reference.level), 14 if below else -6, text)


def _curve(one: Series, x: Scale, y: Scale) -> Markup:
    runs = _runs(thin(one.points, _CURVE_POINTS), y)
    path = " ".join(_path(run, x, y) for run in runs if len(run) > 1)
    return Markup(
        '<svg width="100%" height="100%" viewBox="0 0 {0} {0}" preserveAspectRatio="none">'
        '<path class="curve s{1}{2}" d="{3}"/></svg>'
    ).format(_UNITS, one.slot, " dashed" if one.dashed else "", path)


def _runs(points: Sequence[Point], y: Scale) -> list[list[Point]]:
    """Stretches of points that can be joined: a value without a place on the axis parts them."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if y.shows(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(run: Sequence[Point], x: Scale, y: Scale) -> str:
    at = [f"{_UNITS * x.share(px):.1f} {_UNITS * (1 - y.share(py)):.1f}" for px, py in run]
    return "M" + "L".join(at)


def _dots(one: Series, x: Scale, y: Scale) -> Markup:
    """Every point of a series with dots; of any other only those that no curve joins."""
    runs = _runs(one.points if one.dots else thin(one.points, _CURVE_POINTS), y)
    dot = Markup(
        '<circle class="dot s{}" cx="{:.2f}%" cy="{:.2f}%" r="4"><title>{}</title></circle>'
    )
    return Markup("").join(
        dot.format(one.slot, 100 * x.share(px), _down(y, py), _told(px, [(one.name, py)]))
        for run in runs
        if one.dots or len(run) == 1
        for px, py in run
    )


def _hover_bands(series: Sequence[Series], x: Scale) -> Markup:
    """Invisible full-height bands whose tool-tip tells each curve's value there."""
    lines = [dict(one.points) for one in series if not one.dots]
    steps = sorted({px for line in lines for px in line})
    steps = steps[:: max(1, math.ceil(len(steps) / _HOVER_BANDS))]
    band = Markup(
        '<rect class="band" x="{:.2f}%" width="{:.2f}%" y="0" height="100%">'
        "<title>{}</title></rect>"
    )
    names = [one.name for one in series if not one.dots]
    width = 100 / max(1, len(steps))
    return Markup("").join(
        band.format(
            min(max(0.0, 100 * x.share(step) - width / 2), 100 - width),
            width,
            _told(
                step,
                [(n, line[step]) for n, line in zip(names, lines, strict=True) if step in line],
            ),
        )
        for step in steps
    )


def _told(step: float, values: Iterable[tuple[str, float]]) -> str:
    return f"step {ordinary(step)}: " + ", ".join(f"{name} {ordinary(v)}" for name, v in values)


def stacked_bars(bars: Sequence[Bar], parts: Sequence[str], *, label: str) -> Markup:
    """One horizontal bar for each of `bars`, its parts in the colours of slots 1, 2, ...

    Rows shrink with the number of bars; names and percentages stand where there is room for them.
    """
    row_px = next(px for limit, px in ((16, 28), (64, 18), (math.inf, 7)) if len(bars) <= limit)
    longest_s = max((sum(bar.seconds) for bar in bars), default=0.0) or 1.0
    named_every = math.ceil(14 / row_px)
    body = [_time_axis(longest_s)]
    for index, bar in enumerate(bars):
        name = bar.label if index % named_every == 0 else ""
        body.append(_bar(bar, parts, name, index * row_px, row_px, longest_s))
    return plot("bars", label, body, height_px=len(bars) * row_px)


def _time_axis(longest_s: float) -> Markup:
    tick = Markup(
        '<line class="grid" x1="{0:.2f}%" x2="{0:.2f}%" y1="-4" y2="100%"/>'
        '<text class="tick x" x="{0:.2f}%" y="-10">{1}</text>'
    )
    ticks = nice_ticks(0.0, longest_s, 5)
    return Markup("").join(
        tick.format(100 * at / longest_s, duration(at) if at else "0") for at in ticks
    )


def _bar(
    bar: Bar, parts: Sequence[str], name: str, top_px: int, row_px: int, longest_s: float
) -> Markup:
    gap_px = 4 if row_px > 14 else 1
    total_s = sum(bar.seconds) or 1.0
    told = ", ".join(
        f"{part} {duration(value)} ({percent(value / total_s)})"
        for part, value in zip(parts, bar.seconds, strict=True)
    )
    pieces, left = [], 0.0
    for slot, value in enumerate(bar.seconds, start=1):
        width = 100 * value / longest_s
        caption = percent(value / total_s) if row_px > 14 and width >= 7 else ""
        pieces.append(_piece(slot, left, width, top_px, row_px - gap_px, caption))
        left += width
    return Markup(
        '<g class="bar"><title>{0}: {1}</title>'
        '<text class="tick y" x="0" dx="-8" y="{2}" dy=".35em">{3}</text>{4}</g>'
    ).format(bar.label, told, top_px + (row_px - gap_px) / 2, name, Markup("").join(pieces))


def _piece(
    slot: int, left: float, width: float, top_px: int, height_px: int, caption: str
) -> Markup:
    if width <= 0:
        return Markup("")
    room = "" if width >= 14 else " if-wide"  # hidden on narrow screens
    return Markup(
        '<rect class="piece f{0}" x="{1:.3f}%" width="{2:.3f}%" y="{3}" height="{4}"/>'
        '<text class="share f{0}{5}" x="{6:.3f}%" y="{7}" dy=".35em">{8}</text>'
    ).format(
        slot,
        left,
        width,
        top_px,
        height_px,
        room,
        left + width / 2,
        top_px + height_px / 2,
        caption,
    )
