"""Strips of coloured cells: how uneven the loads of experts are, by layer and step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from meshwright.watch.charts import plot
from meshwright.watch.experts import milestones

BOUNDS = (1.1, 1.25, 1.5, 2.0, 3.0)  # of max / mean; a colour below each, and one above all
_COLUMNS = 48


@dataclass(frozen=True)
class Cell:
    """A value (max / mean) and its tool-tip."""

    value: float
    told: str


@dataclass(frozen=True)
class Strip:
    """A row of cells; None where nothing is known."""

    name: str
    cells: tuple[Cell | None, ...]


def level_names() -> list[str]:
    """What each colour stands for, from even to uneven."""
    between = [f"{low:g} to {high:g}" for low, high in pairwise(BOUNDS)]
    return [f"below {BOUNDS[0]:g}", *between, f"{BOUNDS[-1]:g} and more"]


def heat_map(strips: Sequence[Strip], columns: Sequence[str], *, label: str) -> Markup:
    """`strips` below one another; `columns` are the names of the cells of each.

    Columns that are too many to be told apart are drawn as stretches, each with its worst cell.
    """
    stretches = _stretches(len(columns))
    row_px = 18 if len(strips) <= 32 else 9
    named_every = math.ceil(14 / row_px)
    body = [_ticks([columns[s.start] for s in stretches[:-1]] + list(columns[-1:]))]
    for index, strip in enumerate(strips):
        name = strip.name if index % named_every == 0 else ""
        cells = [_worst(strip.cells[s.start : s.stop]) for s in stretches]
        body.append(_strip(name, cells, index * row_px, row_px))
    return plot("heat", label, body, height_px=len(strips) * row_px)


def _stretches(columns: int) -> list[range]:
    size = max(1, math.ceil(columns / _COLUMNS))
    return [range(start, min(start + size, columns)) for start in range(0, columns, size)]


def _worst(cells: Iterable[Cell | None]) -> Cell | None:
    return max((c for c in cells if c is not None), key=lambda cell: cell.value, default=None)


def _ticks(names: Sequence[str]) -> Markup:
    """Names of the first, the middle and the last column; the outer two stay inside the drawing."""
    tick = Markup('<text class="tick x{}" x="{:.2f}%" y="-8">{}</text>')
    last = len(names) - 1
    return Markup("").join(
        tick.format(" from", 0, names[at])
        if at == 0
        else tick.format(" to", 100, names[at])
        if at == last
        else tick.format("", 100 * (at + 0.5) / len(names), names[at])
        for at in milestones(range(len(names)))
    )


def _strip(name: str, cells: Sequence[Cell | None], top_px: int, row_px: int) -> Markup:
    rect = Markup(
        '<rect class="heat h{}" x="{:.2f}%" width="{:.2f}%" y="{}" height="{}">'
        "<title>{}</title></rect>"
    )
    width = 100 / len(cells)
    body = [
        rect.format(_level(cell.value), at * width, width, top_px, row_px - 2, cell.told)
        for at, cell in enumerate(cells)
        if cell is not None
    ]
    text = Markup('<text class="tick y" x="0" dx="-8" y="{}" dy=".35em">{}</text>')
    return text.format(top_px + row_px / 2 - 1, name) + Markup("").join(body)


def _level(value: float) -> int:
    return next((n for n, bound in enumerate(BOUNDS) if value < bound), len(BOUNDS))
