"""Loads of experts, their colours, and the words of a layout."""

from __future__ import annotations

import re
import tomllib
from typing import Any
from xml.etree import ElementTree

import pytest
from watch_runs import EXPERTS, job_text

from meshwright.base.events import ExpertLoad
from meshwright.plan.job import resolve_job
from meshwright.plan.layout import Layout
from meshwright.watch.experts import by_layer, fullest, milestones, report_steps
from meshwright.watch.heat import BOUNDS, Cell, Strip, heat_map, level_names
from meshwright.watch.layout_words import layout_facts, model_size


def load(step: int, layer: int, imbalance: float, chips: float = 1.0) -> ExpertLoad:
    return ExpertLoad(step, layer, imbalance, chips, hottest=layer, counts=())


def test_loads_are_sorted_by_layer_and_step() -> None:
    loads = [load(20, 3, 1.5), load(20, 1, 1.2), load(40, 3, 1.4)]
    assert report_steps(loads) == [20, 40]
    assert [(one.layer, sorted(one.by_step)) for one in by_layer(loads)] == [
        *((1, [20]), (3, [20, 40]))
    ]


def test_the_fullest_is_that_of_the_newest_report() -> None:
    loads = [load(20, 0, 9.0, 9.0), load(40, 1, 1.5, 1.1), load(40, 2, 1.8, 1.0)]
    worst = fullest(loads)
    assert worst is not None
    assert (worst.step, worst.layer, worst.imbalance, worst.chip_imbalance) == (40, 2, 1.8, 1.1)
    assert fullest([]) is None


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [0]), (2, [0, 1]), (5, [0, 2, 4])])
def test_milestones(count: int, expected: list[int]) -> None:
    assert milestones(range(count)) == expected


def levels(markup: str) -> list[int]:
    return [int(level) for level in re.findall(r'class="heat h(\d)"', markup)]


def test_every_bound_parts_two_colours() -> None:
    values = [1.0, *BOUNDS, 99.0]
    strip = Strip("layer 0", tuple(Cell(value, str(value)) for value in values))
    drawing = heat_map([strip], [str(value) for value in values], label="load")
    assert levels(drawing) == [0, 1, 2, 3, 4, 5, 5]
    assert len(level_names()) == 6 and level_names()[0] == "below 1.1"


def test_a_report_that_is_missing_leaves_a_hole() -> None:
    strip = Strip("layer 0", (Cell(1.0, "a"), None, Cell(2.0, "c")))
    root = ElementTree.fromstring(heat_map([strip], ["1", "2", "3"], label="load"))
    assert [rect.attrib["x"] for rect in root.iter("rect")] == ["0.00%", "66.67%"]


def test_many_columns_are_drawn_as_stretches_with_the_worst_of_each() -> None:
    values = [1.0] * 1000
    values[777] = 5.0
    strip = Strip("layer 0", tuple(Cell(v, f"report {n}") for n, v in enumerate(values)))
    drawing = heat_map([strip], [f"step {n}" for n in range(1000)], label="load")
    root = ElementTree.fromstring(drawing)
    assert len(levels(drawing)) <= 48 and levels(drawing).count(5) == 1
    assert "report 777" in [title.text for title in root.iter("title")]
    ticks = [text.text for text in root.iter("text") if "x" in text.attrib["class"].split()]
    assert ticks[0] == "step 0" and ticks[-1] == "step 999"


def facts(layout: Layout, balance: float | None = None, **model: Any) -> list[str]:
    return layout_facts(resolve_job(tomllib.loads(job_text(layout, 10, model))), balance)


def test_a_plain_layout_has_no_facts_beyond_its_label() -> None:
    assert facts(Layout(dp_replicate=2, tp=2)) == []


def test_what_the_label_does_not_say_is_said() -> None:
    folded = Layout(dp_replicate=2, cp=2, tp=2, pp=2, ep=4, schedule="zbv", zero=1)
    assert facts(folded, 0.966, **EXPERTS) == [
        *("schedule zbv, 2 stages a rank", "stage balance 0.97", "ZeRO stage 1"),
        *("context parallelism by ring", "ep 4, etp 1"),
    ]
    small = Layout(dp_replicate=2, precision="fp8", grad_compression="int8", recompute="full")
    assert facts(small) == ["fp8 scaled by row", "recompute full", "gradients sent in int8"]


def test_active_parameters_are_told_where_they_differ() -> None:
    assert model_size(1_234_567, None) == model_size(1_234_567, 1_234_567) == "1.23 M parameters"
    assert model_size(1_234_567, 400_000) == "1.23 M parameters, 400 k active"
