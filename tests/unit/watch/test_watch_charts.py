"""Scales, line charts, bars and the layout on its chips."""

from __future__ import annotations

import math
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
from watch_runs import plan_of

from meshwright.plan.layout import Layout
from meshwright.watch.charts import Bar, Reference, Series, line_chart, stacked_bars
from meshwright.watch.chips import Arrangement, arrange, draw_layout
from meshwright.watch.formats import duration, layer_range, ordinary, percent, si, size
from meshwright.watch.history import RankPlace, parse_plan
from meshwright.watch.scales import Scale, fit_scale, log_ticks, nice_ticks, thin

LAYOUTS = [
    Layout(),
    Layout(dp_replicate=2, tp=2, pp=2),
    Layout(dp_replicate=2, dp_shard=2, tp=4, pp=2),
    Layout(dp_replicate=2, dp_shard=4, tp=8, pp=8),
    Layout(dp_replicate=64, tp=8),
    Layout(pp=96),
    Layout(dp_replicate=16, tp=8, pp=4),
    Layout(dp_replicate=2, cp=2, tp=2, pp=2),
    Layout(dp_replicate=12, dp_shard=2, cp=4, tp=2, pp=2),
]


V_SHAPED = Layout(dp_replicate=2, cp=2, tp=2, pp=2, schedule="zbv")


def ranks_of(layout: Layout) -> tuple[RankPlace, ...]:
    return parse_plan(plan_of(layout)).ranks


@pytest.mark.parametrize(
    ("low", "high", "about", "expected"),
    [
        (0.0, 100.0, 5, [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]),
        (1.0, 400.0, 6, [100.0, 200.0, 300.0, 400.0]),
        (2.87, 6.3, 5, [3.0, 4.0, 5.0, 6.0]),
        (0.0, 0.0003, 3, [0.0, 0.0001, 0.0002, 0.0003]),
        (-1.0, 1.0, 4, [-1.0, -0.5, 0.0, 0.5, 1.0]),
    ],
)
def test_ticks_are_round(low: float, high: float, about: int, expected: list[float]) -> None:
    assert nice_ticks(low, high, about) == expected


def test_log_ticks() -> None:
    assert log_ticks(0.3, 12.0) == [0.5, 1.0, 2.0, 5.0, 10.0]
    assert log_ticks(1.0, 1e5) == [1.0, 10.0, 100.0, 1e3, 1e4, 1e5]


def test_shares_of_a_scale() -> None:
    assert Scale(2.0, 6.0).share(3.0) == 0.25
    assert Scale(1.0, 100.0, log=True).share(10.0) == pytest.approx(0.5)


@pytest.mark.parametrize("values", [[], [math.nan], [3.0], [0.0, 0.0], [-2.0, math.inf]])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("from_zero", [False, True])
def test_any_values_have_a_scale(values: list[float], log: bool, from_zero: bool) -> None:
    scale = fit_scale(values, log=log, from_zero=from_zero)
    assert scale.high > scale.low
    assert scale.low > 0 or not log
    assert scale.ticks(5) or log


def test_thinning_keeps_ends_spikes_and_gaps() -> None:
    points = [(float(i), 1.0) for i in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    points[12_345] = (12_345.0, math.nan)
    kept = thin(points, 500)
    assert len(kept) < 600
    assert kept == sorted(kept, key=lambda point: point[0])
    assert {points[0], points[-1], points[54_321]} <= set(kept)
    assert any(math.isnan(value) for _, value in kept)


def curves(markup: str) -> list[str]:
    return re.findall(r'<path class="curve[^"]*" d="([^"]*)"', markup)


def test_values_that_are_not_finite_part_the_curve_and_nothing_else() -> None:
    values = [5.0, 4.0, math.nan, 3.0, 2.5, math.inf, 2.0]
    points = tuple((float(step), value) for step, value in enumerate(values, start=1))
    chart = line_chart([Series("loss", points, 1)], label="loss")
    assert [path.count("M") for path in curves(chart)] == [2]
    assert not re.search(r'(d|x\d?|y\d?|cx|cy)="[^"]*(nan|inf)', chart)
    assert "step 3: loss nan" in chart
    assert chart.count("<circle") == 1, "the lone point after the last gap is a dot"
    ElementTree.fromstring(chart)


def test_a_chart_without_one_finite_value_still_stands() -> None:
    chart = line_chart([Series("loss", ((1.0, math.nan),), 1)], label="loss", log=True)
    assert curves(chart) == [""]
    ElementTree.fromstring(chart)


def test_a_logarithmic_chart_leaves_out_what_is_not_positive() -> None:
    chart = line_chart(
        [Series("t", ((1, 1.0), (2, 10.0), (3, 0.0), (4, 1.0), (5, 2.0)), 1)], label="t", log=True
    )
    assert [path.count("M") for path in curves(chart)] == [2]


def test_references_are_named_with_their_level() -> None:
    series = [Series("loss", ((1.0, 6.0), (2.0, 3.0)), 1)]
    chart = line_chart(series, label="loss", references=[Reference("bigram", 3.6, 3)])
    assert ">bigram 3.600</text>" in chart
    line = re.search(r'class="reference s3"[^>]* y1="([\d.]+)%"', chart)
    assert line and float(line[1]) == pytest.approx(
        100 * (1 - (3.6 - 2.82) / (6.18 - 2.82)), abs=0.01
    )


def test_a_mark_off_the_axis_is_not_drawn() -> None:
    series = [Series("loss", ((10.0, 6.0), (20.0, 3.0)), 1)]
    chart = line_chart(series, label="loss", marks=[(15.0, "inside"), (5.0, "outside")])
    assert "inside" in chart and "outside" not in chart


def test_names_are_escaped() -> None:
    evil = "<script>&"
    series = [Series(evil, ((1.0, 1.0), (2.0, 2.0)), 1, dots=True)]
    pages = [
        line_chart(series, label=evil, references=[Reference(evil, 1.5, 2)], marks=[(1.0, evil)]),
        stacked_bars([Bar(evil, (1.0,))], [evil], label=evil),
    ]
    for page in pages:
        assert "<script" not in page
        ElementTree.fromstring(page)


@pytest.mark.parametrize("count", [1, 16, 17, 64, 65, 300])
def test_bars_tell_every_rank_and_fill_the_longest(count: int) -> None:
    bars = [Bar(f"rank {rank}", (0.2, 0.1 + 0.001 * rank, 0.0)) for rank in range(count)]
    chart = stacked_bars(bars, ["compute", "wait", "data"], label="split")
    root = ElementTree.fromstring(chart)
    assert [t.text.split(":")[0] for t in root.iter("title") if t.text] == [b.label for b in bars]
    last = [float(r.attrib["width"].rstrip("%")) for r in root.findall("g")[-1].iter("rect")]
    assert sum(last) == pytest.approx(100, abs=0.01)
    assert len(last) == 2, "a part without time has no piece"


def test_bars_of_no_time_do_not_divide_by_it() -> None:
    chart = stacked_bars([Bar("rank 0", (0.0, 0.0))], ["a", "b"], label="split")
    assert "rank 0: a 0 ms (0.0 %)" in chart


def overlapping(plan: Arrangement) -> list[tuple[int, int]]:
    wide, tall = plan.detail.width_px, plan.detail.height_px
    return [
        (a.place.rank, b.place.rank)
        for a, b in combinations(plan.boxes, 2)
        if abs(a.left_px - b.left_px) < wide and abs(a.top_px - b.top_px) < tall
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
def test_every_rank_has_its_own_box_inside_the_drawing(layout: Layout) -> None:
    plan = arrange(ranks_of(layout))
    assert [box.place.rank for box in plan.boxes] == list(range(layout.world))
    assert overlapping(plan) == []
    assert max(box.left_px for box in plan.boxes) + plan.detail.width_px <= plan.width_px
    assert max(box.top_px for box in plan.boxes) + plan.detail.height_px <= plan.height_px


def row(place: RankPlace) -> tuple[int, ...]:
    return place.dp_replicate, place.dp_shard, place.cp


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
def test_stages_are_columns_replicas_rows_and_tp_neighbours_touch(layout: Layout) -> None:
    plan = arrange(ranks_of(layout))
    for a, b in zip(plan.boxes, plan.boxes[1:], strict=False):
        if a.place.pp != b.place.pp:
            assert b.left_px > a.left_px
        elif row(a.place) != row(b.place):
            assert b.top_px > a.top_px
        elif a.top_px == b.top_px:
            assert b.left_px - a.left_px == plan.detail.width_px
        else:
            assert b.top_px - a.top_px == plan.detail.height_px


def test_small_layouts_tell_all_in_the_box_and_large_ones_in_the_tool_tip() -> None:
    small = draw_layout(ranks_of(LAYOUTS[1]))
    texts = [element.text for element in ElementTree.fromstring(small).iter("text")]
    assert {"rank 5", "cpu:5", "layers 2-3", "head", "dp 0 · tp 1", "154 k params"} <= set(texts)
    large = draw_layout(ranks_of(LAYOUTS[3]))
    assert "154 k params" not in large
    told = [title.text or "" for title in ElementTree.fromstring(large).iter("title")]
    assert "rank 511 on cpu:511 (local)\nstage 7: layer 7, head\n" in told[-1]
    assert "replica 1, shard 3, tensor slice 7\n154,321 parameters held" in told[-1]


def svg_texts(drawing: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(drawing).iter("text")]


def test_context_parts_and_stages_of_a_v_are_told_in_the_box_and_the_tool_tip() -> None:
    drawing = draw_layout(ranks_of(V_SHAPED), V_SHAPED.chunks)
    texts = svg_texts(drawing)
    assert {"dp 1 · cp 0 · tp 1", "dp 1 · cp 0", "layers 0, 3", "embed + head", "pp 1"} <= set(
        texts
    )
    told = [title.text or "" for title in ElementTree.fromstring(drawing).iter("title")]
    assert "2 stages of pipeline rank 0: layers 0, 3, embed, head\n" in told[0]
    assert "replica 1, shard 0, context part 0, tensor slice 1\n" in told[5]


def test_without_context_parallelism_nothing_of_it_is_told() -> None:
    drawing = draw_layout(ranks_of(LAYOUTS[1]))
    assert "cp " not in drawing and "context" not in drawing
    assert "stage 1" in svg_texts(drawing)


def test_names_of_many_rows_have_room_beside_the_boxes() -> None:
    plan = arrange(ranks_of(LAYOUTS[-1]))
    longest = max(len(plan.rows.name(box.place)) for box in plan.boxes)
    assert longest == len("r11 s1 · cp 3")
    assert min(box.left_px for box in plan.boxes) >= 6 * longest


def test_numbers_as_people_read_them() -> None:
    assert [si(v) for v in (0.5, 950, 12_345, 999_999, 1.234e6, 4.5e13)] == [
        *("0.50", "950", "12.3 k", "1.00 M", "1.23 M", "45.0 T")
    ]
    assert [duration(v) for v in (0.0844, 12.34, 59.99, 141.5, 12_000)] == [
        *("84.4 ms", "12.3 s", "1 min 00 s", "2 min 22 s", "3 h 20 min")
    ]
    assert [percent(v) for v in (0.018, 0.41, 1.0)] == ["1.8 %", "41 %", "100 %"]
    assert [ordinary(v) for v in (0.0003, 0.25, 1200, 250_000, math.nan)] == [
        *("0.0003", "0.25", "1,200", "250 k", "nan")
    ]
    assert [layer_range(v) for v in ((), (2,), (4, 5, 6))] == ["no layers", "layer 2", "layers 4-6"]
    assert [layer_range(v) for v in ((0, 1, 6, 7), (0, 3), (5, 0, 1))] == [
        *("layers 0-1, 6-7", "layers 0, 3", "layers 0-1, 5")
    ]
    assert [size(v) for v in (0, 950, 1.2e9)] == ["0.00 B", "950 B", "1.20 GB"]
