"""The layout drawn on its chips: columns are pipeline stages, rows are data-parallel ranks.

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
_TOP_PX = 26
_HUES = (215, 30, 160, 285, 55, 190, 340, 95)  # neighbours far apart, also for colour-blind eyes


@dataclass(frozen=True)
class Detail:
    """How much a box tells, and how large it is for that."""

    lines: int
    width_px: int
    height_px: int


_DETAILS = (Detail(5, 114, 84), Detail(2, 66, 32), Detail(1, 26, 17))


@dataclass(frozen=True)
class Box:
    """Where one rank is drawn."""

    place: RankPlace
    left_px: int
    top_px: int


@dataclass(frozen=True)
class Arrangement:
    """All boxes, their size, and the size of the drawing."""

    detail: Detail
    replicas: int
    shards: int
    boxes: tuple[Box, ...]
    width_px: int
    height_px: int

    def data_rank(self, place: RankPlace) -> str:
        """`dp 3`, or `r1 s1` (replica, shard) where both axes are in use."""
        if self.replicas > 1 and self.shards > 1:
            return f"r{place.dp_replicate} s{place.dp_shard}"
        return f"dp {place.dp_replicate * self.shards + place.dp_shard}"


@dataclass(frozen=True)
class _Cell:
    """The chips of one stage and one data-parallel rank: `across` x `down` of them."""

    detail: Detail
    across: int
    down: int

    @property
    def pitch_x_px(self) -> int:
        return self.across * self.detail.width_px + _STAGE_GAP_PX

    @property
    def pitch_y_px(self) -> int:
        return self.down * self.detail.height_px + _ROW_GAP_PX


def arrange(ranks: Sequence[RankPlace]) -> Arrangement:
    """Positions of `ranks` in pixels, with as much detail as fits; no two boxes overlap."""
    stages = 1 + max((place.pp for place in ranks), default=0)
    shards = 1 + max((place.dp_shard for place in ranks), default=0)
    replicas = 1 + max((place.dp_replicate for place in ranks), default=0)
    tp = 1 + max((place.tp for place in ranks), default=0)
    rows = replicas * shards
    cell = _largest_cell(stages, rows, tp)
    boxes = tuple(
        Box(
            place,
            _LEFT_PX + place.pp * cell.pitch_x_px + place.tp % cell.across * cell.detail.width_px,
            _TOP_PX
            + (place.dp_replicate * shards + place.dp_shard) * cell.pitch_y_px
            + place.tp // cell.across * cell.detail.height_px,
        )
        for place in ranks
    )
    return Arrangement(
        detail=cell.detail,
        replicas=replicas,
        shards=shards,
        boxes=boxes,
        width_px=_LEFT_PX + stages * cell.pitch_x_px - _STAGE_GAP_PX + 1,
        height_px=_TOP_PX + rows * cell.pitch_y_px - _ROW_GAP_PX + 1,
    )


def _largest_cell(stages: int, rows: int, tp: int) -> _Cell:
    """The most detailed cell that fits; tp groups fold into lines where they are too wide."""
    for detail in _DETAILS:
        for across in (n for n in range(tp, 0, -1) if tp % n == 0):
            cell = _Cell(detail, across, tp // across)
            wide, tall = stages * cell.pitch_x_px, rows * cell.pitch_y_px
            if wide <= _WIDEST_PX and tall <= _TALLEST_PX:
                return cell
    across = max(n for n in range(1, tp + 1) if tp % n == 0 and n <= 8)
    return _Cell(_DETAILS[-1], across, tp // across)


def draw_layout(ranks: Sequence[RankPlace]) -> Markup:
    """`ranks` as an SVG of fixed size that shrinks a little on narrow screens, then scrolls."""
    plan = arrange(ranks)
    body = [*_headings(plan), *(_chip(box, plan) for box in plan.boxes)]
    opening = Markup(
        '<svg class="chips" role="img" aria-label="layout on its chips" viewBox="0 0 {0} {1}"'
        ' style="width:{0}px;min-width:{2}px">'
    ).format(plan.width_px, plan.height_px, round(0.88 * plan.width_px))
    return opening + Markup("").join(body) + Markup("</svg>")


def describe(place: RankPlace) -> str:
    """All that is known of one rank, for its tool-tip."""
    return (
        f"rank {place.rank} on {place.chip} ({place.node})\n"
        f"stage {place.pp}: {layer_range(place.layers)}{_and(place.holds)}\n"
        f"replica {place.dp_replicate}, shard {place.dp_shard}, tensor slice {place.tp}\n"
        f"{place.params:,} parameters held"
    )


def _and(holds: Sequence[str]) -> str:
    return "".join(f", {name}" for name in holds)


def _headings(plan: Arrangement) -> list[Markup]:
    """A name over each stage and before each row."""
    stage = Markup('<text class="heading" x="{}" y="{}">{}</text>')
    row = Markup('<text class="heading row" x="{}" y="{}" dy=".35em">{}</text>')
    word = "stage " if plan.detail.lines > 1 else "s"
    top = [box for box in plan.boxes if box.place.tp == 0 and box.top_px == _TOP_PX]
    first = [box for box in plan.boxes if box.place.tp == 0 and box.place.pp == 0]
    middle_px = plan.detail.height_px / 2
    return [
        *(stage.format(box.left_px + 1, _TOP_PX - 9, f"{word}{box.place.pp}") for box in top),
        *(
            row.format(_LEFT_PX - 8, box.top_px + middle_px, plan.data_rank(box.place))
            for box in first
        ),
    ]


def _chip(box: Box, plan: Arrangement) -> Markup:
    return Markup(
        '<g class="chip" style="--hue:{}"><title>{}</title>'
        '<rect x="{}" y="{}" width="{}" height="{}" rx="3"/>{}</g>'
    ).format(
        _HUES[box.place.pp % len(_HUES)],
        describe(box.place),
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
        short = f"{plan.data_rank(place)} t{place.tp}".replace("dp ", "d")
        return _line(box, 6, 14, "rank", str(place.rank)) + _line(box, 6, 26, "", short)
    where = f"{plan.data_rank(place)} · tp {place.tp}"
    holds = " + ".join(place.holds)
    lines = (layer_range(place.layers), holds, where, f"{si(place.params)} params")
    return Markup("").join(
        [
            _line(box, 8, 17, "rank", f"rank {place.rank}"),
            _line(box, detail.width_px - 8, 17, "on", _fit(place.chip, 8)),
            *(_line(box, 8, 33 + 14 * n, "", _fit(text, 17)) for n, text in enumerate(lines)),
        ]
    )


def _line(box: Box, right_px: int, down_px: int, name: str, text: str) -> Markup:
    pattern = Markup('<text class="{}" x="{}" y="{}">{}</text>')
    return pattern.format(name, box.left_px + right_px, box.top_px + down_px, text)


def _fit(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
