"""A predicted step as a trace: the schedule's order, the model's seconds."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from plan_questions import question

from meshwright.plan.mapping import RankMap
from meshwright.plan.prediction import predict
from meshwright.plan.search_notation import parse_layout
from meshwright.plan.search_traffic import placed, traffic
from meshwright.plan.trace import timed, trace

ASKED = question("llama3-8b", "p5:32", global_batch=64)
LAYOUTS = ["tp4,pp4,dp2,mbs1", "tp4,pp4,vpp4,dp2,mbs1", "tp8,dp4,mbs2", "tp4,pp4,dp2,mbs1,zbv"]


@pytest.mark.parametrize("text", LAYOUTS)
def test_ranks_do_one_thing_at_a_time(text: str) -> None:
    layout = parse_layout(text, 32)
    found = trace(ASKED, layout)
    json.dumps(found)
    for rank in range(layout.pp):
        spans = [e for e in found["traceEvents"] if e["tid"] == rank and e["ph"] == "X"]
        spans.sort(key=lambda event: event["ts"])
        assert len(spans) > 3
        for before, after in pairwise(spans):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    names = {e["args"]["name"] for e in found["traceEvents"] if e["ph"] == "M"}
    assert names == {f"pipeline rank {rank}" for rank in range(layout.pp)}


@pytest.mark.parametrize("text", LAYOUTS[:3])
def test_the_schedule_takes_what_the_closed_form_says(text: str) -> None:
    """Megatron shares layers out evenly; what is left between them is how the last stage's head
    delays the others."""
    layout = parse_layout(text, 32)
    parts = predict(ASKED, layout).time_parts
    once = sum(parts[name] for name in ("dp", "optimizer", "overhead"))
    drawn = timed(ASKED, layout, 64 // (layout.dp * layout.micro_batch)).makespan_s
    assert drawn == pytest.approx(sum(parts.values()) - once, rel=0.06)


def test_long_steps_are_drawn_in_part() -> None:
    big = question("llama3-8b", "p5:32", global_batch=4096)
    found = trace(big, parse_layout("tp4,pp4,dp2,mbs1", 32))
    assert found["metadata"]["micro_batches"] == 2048
    assert found["metadata"]["micro_batches_drawn"] < 100


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("tp8,dp4,mbs1", {"tp", "dp"}),
        ("tp4,pp4,cp2,dp1,mbs1", {"tp", "pp", "cp"}),
        ("shard8,zero3,mbs1", {"fsdp", "dp_replicate"}),
        ("fsdp32,mbs1", {"fsdp"}),
    ],
)
def test_traffic_names_the_groups_of_a_layout(text: str, groups: set[str]) -> None:
    layout = parse_layout(text, 32)
    found = traffic(ASKED, layout)
    assert found.keys() == groups
    assert all(one.bytes > 0 and one.messages > 0 for one in found.values())
    mapping: RankMap = placed(ASKED, layout)
    assert set(mapping.terms) == groups
    if "tp" in groups:
        assert mapping.placements["tp"].level == "nvlink4-8"


def test_experts_have_traffic_too() -> None:
    moe = question("mixtral-8x7b", "p5:32", global_batch=64)
    assert "ep" in traffic(moe, parse_layout("tp2,ep8,mbs1", 32))
