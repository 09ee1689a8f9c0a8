"""The layout drawn on its chips: columns are pipeline ranks, rows are data-parallel ranks and, with
context parallelism, the parts of their sequences.

Chips of one tensor-parallel group touch. Boxes shrink as ranks grow in number: first they lose
lines, at last they hold the rank alone; the tool-tip always tells everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from meshwright.watch.formats import layer_range, si
from meshwright.watch.history import RankPlace

_WIDEST_PX = 1080
_TALLEST_PX = 1400
_STAGE_GAP_PX = 16
_ROW_GAP_PX = 10
_LEFT_PX = 44
_CHAR_PX = 6.2  # mean width of a character of the headings and boxes
_TOP_PX = 26
_HUES = (215, 30, 160, 285, 55, 190, 340, 95)  # neighbours far apart, also for colour-blind eyes


@dataclass(frozen=True)
class Detail:
    """How much a box tells, and how large it is for that."""

    lines: int
    width_px: int
    height_px: int


_DETAILS = (Detail(5, 114, 84), Detail(2, 66, 32), Detail(1, 26, 17))
_DETAILS_CP = (Detail(5, 128, 84), Detail(2, 78, 32), Detail(1, 26, 17))  # room for one more axis


@dataclass(frozen=True)
class Box:
    """Where one rank is drawn."""

    place: RankPlace
    left_px: int
    top_px: int


@dataclass(frozen=True)
class Rows:
    """The axes that rows stand for, and their sizes."""

    replicas: int
    shards: int
    cp: int

    def __len__(self) -> int:
        return self.replicas * self.shards * self.cp

    def index(self, place: RankPlace) -> int:
        """The row of a rank."""
        return (place.dp_replicate * self.shards + place.dp_shard) * self.cp + place.cp

    def name(self, place: RankPlace) -> str:
        """`dp 3`, or `r1 s1` (replica, shard) where both axes are in use; ` · cp 0` where cp is."""
        return self._data_rank(place) + (f" · cp {place.cp}" if self.cp > 1 else "")

    def _data_rank(self, place: RankPlace) -> str:
        if self.replicas > 1 and self.shards > 1:
            return f"r{place.dp_replicate} s{place.dp_shard}"
        return f"dp {place.dp_replicate * self.shards + place.dp_shard}"


@dataclass(frozen=True)
class Arrangement:
    """All boxes, their size, and the size of the drawing."""

    detail: Detail
    rows: Rows
    chunks: int
    boxes: tuple[Box, ...]
    left_px: int
    width_px: int
    height_px: int


@dataclass(frozen=True)
class _Cell:
    """The chips of one pipeline rank and one row: `across` x `down` of them."""

    detail: Detail
    across: int
    down: int

    @property
    def pitch_x_px(self) -> int:
        return self.across * self.detail.width_px + _STAGE_GAP_PX

    @property
    def pitch_y_px(self) -> int:
        return self.down * self.detail.height_px + _ROW_GAP_PX


def arrange(ranks: Sequence[RankPlace], chunks: int = 1) -> Arrangement:
    """Positions of `ranks`, each with `chunks` pipeline stages, in pixels, with as much detail as
    fits; no two boxes overlap."""
    stages, replicas, shards, cp, tp = (
        1 + max((getattr(place, axis) for place in ranks), default=0)
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    )
    rows = Rows(replicas, shards, cp)
    cell = _largest_cell(stages, len(rows), tp, _DETAILS_CP if cp > 1 else _DETAILS)
    longest = max((len(rows.name(place)) for place in ranks), default=0)
    left_px = max(_LEFT_PX, round(longest * _CHAR_PX) + 12)
    boxes = tuple(
        Box(
            place,
            left_px + place.pp * cell.pitch_x_px + place.tp % cell.across * cell.detail.width_px,
            _TOP_PX
            + rows.index(place) * cell.pitch_y_px
            + place.tp // cell.across * cell.detail.height_px,
        )
        for place in ranks
    )
    return Arrangement(
        detail=cell.detail,
        rows=rows,
        chunks=chunks,
        boxes=boxes,
        left_px=left_px,
        width_px=left_px + stages * cell.pitch_x_px - _STAGE_GAP_PX + 1,
        height_px=_TOP_PX + len(rows) * cell.pitch_y_px - _ROW_GAP_PX + 1,
    )


def _largest_cell(stages: int, rows: int, tp: int, details: Sequence[Detail]) -> _Cell:
    """The most detailed cell that fits; tp groups fold into lines where they are too wide."""
    for detail in details:
        for across in (n for n in range(tp, 0, -1) if tp % n == 0):
            cell = _Cell(detail, across, tp // across)
            wide, tall = stages * cell.pitch_x_px, rows * cell.pitch_y_px
            if wide <= _WIDEST_PX and tall <= _TALLEST_PX:
                return cell
    across = max(n for n in range(1, tp + 1) if tp % n == 0 and n <= 8)
    return _Cell(details[-1], across, tp // across)


def draw_layout(ranks: Sequence[RankPlace], chunks: int = 1) -> Markup:
    """`ranks`, each with `chunks` pipeline stages, as an SVG of fixed size that shrinks a little on
    narrow screens, then scrolls."""
    plan = arrange(ranks, chunks)
    body = [*_headings(plan), *(_chip(box, plan) for box in plan.boxes)]
    opening = Markup(
        '<svg class="chips" role="img" aria-label="layout on its chips" viewBox="0 0 {0} {1}"'
        ' style="width:{0}px;min-width:{2}px">'
    ).format(plan.width_px, plan.height_px, round(0.88 * plan.width_px))
    return opening + Markup("").join(body) + Markup("</svg>")


def describe(place: RankPlace, plan: Arrangement) -> str:
    """All that is known of one rank, for its tool-tip."""
    column = "stage" if plan.chunks == 1 else f"{plan.chunks} stages of pipeline rank"
    part = f"context part {place.cp}, " if plan.rows.cp > 1 else ""
    return (
        f"rank {place.rank} on {place.chip} ({place.node})\n"
        f"{column} {place.pp}: {layer_range(place.layers)}{_and(place.holds)}\n"
        f"replica {place.dp_replicate}, shard {place.dp_shard}, {part}tensor slice {place.tp}\n"
        f"{place.params:,} parameters held"
    )


def _and(holds: Sequence[str]) -> str:
    return "".join(f", {name}" for name in holds)


def _headings(plan: Arrangement) -> list[Markup]:
    """A name over each column and before each row."""
    stage = Markup('<text class="heading" x="{}" y="{}">{}</text>')
    row = Markup('<text class="heading row" x="{}" y="{}" dy=".35em">{}</text>')
    name, short = ("stage ", "s") if plan.chunks == 1 else ("pp ", "p")
    word = name if plan.detail.lines > 1 else short
    top = [box for box in plan.boxes if box.place.tp == 0 and box.top_px == _TOP_PX]
    first = [box for box in plan.boxes if box.place.tp == 0 and box.place.pp == 0]
    middle_px = plan.detail.height_px / 2
    return [
        *(stage.format(box.left_px + 1, _TOP_PX - 9, f"{word}{box.place.pp}") for box in top),
        *(
            row.format(plan.left_px - 8, box.top_px + middle_px, plan.rows.name(box.place))
            for box in first
        ),
    ]


def _chip(box: Box, plan: Arrangement) -> Markup:
    return Markup(
        '<g class="chip" style="--hue:{}"><title>{}</title>'
        '<rect x="{}" y="{}" width="{}" height="{}" rx="3"/>{}</g>'
    ).format(
        _HUES[box.place.pp % len(_HUES)],
        describe(box.place, plan),
        box.left_px + 1,
        box.top_px + 1,
        plan.detail.width_px - 2,
        plan.detail.height_px - 2,
        _text(box, plan),
    )


def _text(box: Box, plan: Arrangement) -> Markup:
    place, detail = box.place, plan.detail
    if detail.lines == 1:
        return _line(box, detail.width_px // 2, 12, "rank tiny", str(place.rank))
    if detail.lines == 2:
        short = f"{plan.rows.name(place)} t{place.tp}"
        for word, letter in (("dp ", "d"), (" · cp ", " c")):
            short = short.replace(word, letter)
        short = _fit(short, round((detail.width_px - 8) / _CHAR_PX))
        return _line(box, 6, 14, "rank", str(place.rank)) + _line(box, 6, 26, "", short)
    where = f"{plan.rows.name(place)} · tp {place.tp}"
    room = round((detail.width_px - 10) / _CHAR_PX)
    holds = " + ".join(place.holds)
    lines = (layer_range(place.layers), holds, where, f"{si(place.params)} params")
    return Markup("").join(
        [
            _line(box, 8, 17, "rank", f"rank {place.rank}"),
            _line(box, detail.width_px - 8, 17, "on", _fit(place.chip, 8)),
            *(_line(box, 8, 33 + 14 * n, "", _fit(text, room)) for n, text in enumerate(lines)),
        ]
    )


def _line(box: Box, right_px: int, down_px: int, name: str, text: str) -> Markup:
    pattern = Markup('<text class="{}" x="{}" y="{}">{}</text>')
    return pattern.format(name, box.left_px + right_px, box.top_px + down_px, text)


def _fit(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
