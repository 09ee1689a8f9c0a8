"""An answer as one HTML page with charts in SVG; nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10

from meshwright.plan.explain import TITLES
from meshwright.plan.prediction import GIB, Prediction
from meshwright.plan.scaling import Scaling

WIDTH, BAR, LEFT = 760, 26, 250
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
}
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
        parts += [_table(best), "<h2>Time of a step</h2>", time_chart(best)]
        parts += ["<h2>Memory of the heaviest chip</h2>", memory_chart(best)]
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


def time_chart(best: Sequence[Prediction]) -> str:
    """Bars of the parts of a step, with the interval as a whisker."""
    most = max(p.step_time_high_s for p in best)
    scale = (WIDTH - LEFT - 20) / most
    shapes = []
    for row, p in enumerate(best):
        y, x = 10 + row * (BAR + 14), float(LEFT)
        shapes.append(_text(LEFT - 8, y + BAR / 2 + 4, p.name[:38], "end"))
        for name, seconds in p.time_parts.items():
            width = max(seconds * scale, 0.0)
            title = f"{TITLES[name]}: {seconds:.3g} s ({seconds / p.step_time_s:.0%})"
            shapes.append(_rect(x, y, width, BAR, COLOURS[name], title))
            x += width
        low, high = LEFT + p.step_time_low_s * scale, LEFT + p.step_time_high_s * scale
        shapes.append(
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + BAR + 4}" y2="{y + BAR + 4}" '
            'stroke="#222" stroke-width="1.5"/>'
        )
    height = 10 + len(best) * (BAR + 14)
    return _svg(height + 60, [*shapes, *_legend(height + 16, best)])


def _legend(y: float, best: Sequence[Prediction]) -> list[str]:
    shown = [n for n in COLOURS if any(p.time_parts[n] > 0.005 * p.step_time_s for p in best)]
    shapes = []
    for place, name in enumerate(shown):
        x = 10 + place % 7 * 105
        line = y + place // 7 * 20
        shapes += [_rect(x, line - 10, 12, 12, COLOURS[name], TITLES[name])]
        shapes += [_text(x + 17, line, name, "start")]
    return shapes


def memory_chart(best: Sequence[Prediction]) -> str:
    """Bars of memory against the capacity, the interval as a whisker."""
    most = max(max(p.memory_high_bytes, p.capacity_bytes) for p in best)
    scale = (WIDTH - LEFT - 20) / most
    shapes = []
    for row, p in enumerate(best):
        y, x = 10 + row * (BAR + 14), float(LEFT)
        shapes.append(_text(LEFT - 8, y + BAR / 2 + 4, p.name[:38], "end"))
        for place, (name, size) in enumerate(p.memory_parts.items()):
            colour = list(COLOURS.values())[place % len(COLOURS)]
            shapes.append(_rect(x, y, size * scale, BAR, colour, f"{name}: {size / GIB:.2f} GiB"))
            x += size * scale
        low, high = LEFT + p.memory_low_bytes * scale, LEFT + p.memory_high_bytes * scale
        shapes.append(
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + BAR + 4}" y2="{y + BAR + 4}" '
            'stroke="#222" stroke-width="1.5"/>'
        )
    edge = LEFT + best[0].capacity_bytes * scale
    height = 10 + len(best) * (BAR + 14)
    shapes.append(f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="0" y2="{height}" stroke="#c00"/>')
    capacity = f"{best[0].capacity_bytes / GIB:.0f} GiB"
    return _svg(height + 24, [*shapes, _text(edge, height + 14, capacity, "middle")])


def scaling_chart(curve: Scaling) -> str:
    """Efficiency by number of chips, chips on a logarithmic axis."""
    points = [p for p in curve.points if p.efficiency is not None]
    if not points:
        return ""
    low, high = log10(points[0].chips), log10(points[-1].chips)
    top = max(p.efficiency or 0.0 for p in points) * 1.05

    def at(chips: int, efficiency: float) -> tuple[float, float]:
        x = 60 + (log10(chips) - low) / max(high - low, 1e-9) * (WIDTH - 120)
        return x, 220 - efficiency / top * 200

    places = [at(p.chips, p.efficiency or 0.0) for p in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    shapes = [f'<polyline points="{path}" fill="none" stroke="#3b6ea5" stroke-width="2"/>']
    for point, (x, y) in zip(points, places, strict=True):
        colour = "#c44e52" if point.chips == curve.cliff else "#3b6ea5"
        title = f"{point.chips} chips: {point.efficiency:.0%}"
        shapes.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
            f"<title>{title}</title></circle>"
        )
        shapes += [_text(x, 240, str(point.chips), "middle")]
        shapes += [_text(x, y - 9, f"{point.efficiency:.0%}", "middle")]
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
