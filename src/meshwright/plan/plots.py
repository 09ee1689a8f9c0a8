"""An answer as one HTML page with charts in SVG; nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10

from meshwright.plan.plots_data import CLIFF, LINE, Bars, dots, memory_bars, time_bars
from meshwright.plan.prediction import GIB, Prediction
from meshwright.plan.scaling import Scaling

WIDTH, BAR, LEFT = 760, 26, 250
LONGEST_NAME = 38  # letters that have room left of a bar
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;"
    "color:#222}table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .7rem;"
    "border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child{text-align:left}"
    "svg text{font:12px system-ui,sans-serif;fill:#333}li{margin:.1rem 0}"
)


def page(title: str, best: Sequence[Prediction], curve: Scaling | None = None) -> str:
    """The page: a table of layouts, where their time and memory goes, the curve if there is one."""
    parts = [f"<h1>{escape(title)}</h1>"]
    if best:
        parts.append(_table(best))
        for bars in (time_bars(best), memory_bars(best)):
            parts += [f"<h2>{bars.title}</h2>", bar_chart(bars)]
    if curve:
        parts += ["<h2>Scaling</h2>", scaling_chart(curve), f"<p>{escape(curve.reason)}</p>"]
    if best:
        lines = "".join(f"<li>{escape(line)}</li>" for line in best[0].assumptions)
        parts.append(f"<h2>Assumptions</h2><ul>{lines}</ul>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _table(best: Sequence[Prediction]) -> str:
    head = (
        "layout", "step, s", "from", "to", "tokens/s/chip", "MFU", "GiB", "P(out of memory)",
        "$ per T tokens",
    )  # fmt: skip
    rows = [
        [
            p.name, f"{p.step_time_s:.3g}", f"{p.step_time_low_s:.3g}", f"{p.step_time_high_s:.3g}",
            f"{p.tokens_per_s_per_chip:,.0f}", f"{p.mfu:.1%}", f"{p.memory_bytes / GIB:.1f}",
            f"{p.oom_probability:.1%}",
            f"{p.dollars_per_trillion_tokens:,.0f}" if p.dollars_per_trillion_tokens else "",
        ]
        for p in best
    ]  # fmt: skip
    cells = [f"<th>{escape(name)}</th>" for name in head]
    body = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    lines = "".join(f"<tr>{row}</tr>" for row in ["".join(cells), *body])
    return f"<table>{lines}</table>"


def bar_chart(bars: Bars) -> str:
    """Bars of their parts, each with its interval as a whisker, and the limit if there is one."""
    scale = (WIDTH - LEFT - 20) / bars.most
    shapes = []
    for row, bar in enumerate(bars.rows):
        y, x = 10 + row * (BAR + 14), float(LEFT)
        shapes.append(_text(LEFT - 8, y + BAR / 2 + 4, bar.name[:LONGEST_NAME], "end"))
        for part in bar.parts:
            shapes.append(_rect(x, y, part.value * scale, BAR, part.colour, part.title))
            x += part.value * scale
        low, high = LEFT + bar.low * scale, LEFT + bar.high * scale
        shapes.append(
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + BAR + 4}" y2="{y + BAR + 4}" '
            'stroke="#222" stroke-width="1.5"/>'
        )
    height = 10 + len(bars.rows) * (BAR + 14)
    if bars.limit is not None:
        edge = LEFT + bars.limit * scale
        shapes.append(f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="0" y2="{height}" stroke="#c00"/>')
        shapes.append(_text(edge, height + 14, f"{bars.limit:.0f} {bars.unit}", "middle"))
        height += 20
    return _svg(height + 60, [*shapes, *_legend(height + 16, bars)])


def _legend(y: float, bars: Bars) -> list[str]:
    shapes = []
    for place, part in enumerate(bars.legend):
        x = 10 + place % 7 * 105
        line = y + place // 7 * 20
        shapes += [_rect(x, line - 10, 12, 12, part.colour, part.name)]
        shapes += [_text(x + 17, line, part.name, "start")]
    return shapes


def scaling_chart(curve: Scaling) -> str:
    """Efficiency by number of chips, chips on a logarithmic axis."""
    points = dots(curve)
    if not points:
        return ""
    low, high = log10(points[0].chips), log10(points[-1].chips)
    top = max(dot.efficiency for dot in points) * 1.05

    def at(chips: int, efficiency: float) -> tuple[float, float]:
        x = 60 + (log10(chips) - low) / max(high - low, 1e-9) * (WIDTH - 120)
        return x, 220 - efficiency / top * 200

    places = [at(dot.chips, dot.efficiency) for dot in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    shapes = [f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="2"/>']
    for dot, (x, y) in zip(points, places, strict=True):
        title = f"{dot.chips} chips: {dot.efficiency:.0%}"
        shapes.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{CLIFF if dot.is_cliff else LINE}">'
            f"<title>{title}</title></circle>"
        )
        shapes += [_text(x, 240, str(dot.chips), "middle")]
        shapes += [_text(x, y - 9, f"{dot.efficiency:.0%}", "middle")]
    return _svg(250, shapes)


def _svg(height: float, shapes: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" role="img">{"".join(shapes)}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{colour}"><title>{escape(title)}</title></rect>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
