"""Cases of ../shared/cases/planner.md on scaling that no other test covers, by number.

Figures are those of the threads. The others are in test_search.py, test_explain.py and
cost/test_time_cases.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from plan_questions import question

from meshwright.catalog import cluster
from meshwright.plan.explain_gap import Gap, gap
from meshwright.plan.prediction import predict
from meshwright.plan.scaling import CLIFF, Point, kept
from meshwright.plan.search_notation import parse_layout


def test_case_31_zero_3_over_all_chips_is_a_cliff_at_640() -> None:
    """deepspeedai/DeepSpeed#3485: 80 machines take 3 days, 40 take 4: 1.33 times. Model and network
    are not given: 13B, 8 A100 and 400 Gb/s a machine. Groups of one machine (MiCS) help."""
    asked = question(
        "llama2-13b", "p4d:320", framework="deepspeed", seq_len=2048, global_batch=1280
    )
    twice = asked.on(cluster("p4d:640"))
    half = predict(asked, parse_layout("shard320,zero3,mbs4,full", 320))
    whole = predict(twice, parse_layout("shard640,zero3,mbs2,full", 640))
    assert half.step_time_s / whole.step_time_s == pytest.approx(4 / 3, rel=0.1)
    assert kept(Point(320, half, 1.0), Point(640, whole, None)) < CLIFF
    traffic = {name: part for name, part in whole.time_parts.items() if name != "compute"}
    assert max(traffic, key=lambda name: traffic[name]) == "shard"
    grouped = predict(twice, parse_layout("replicate80,shard8,zero3,mbs2,full", 640))
    assert half.step_time_s / grouped.step_time_s > 1.6


def test_case_31_is_no_cliff_where_each_chip_has_200_gb_of_its_own() -> None:
    asked = question(
        "llama2-13b", "a100:320", framework="deepspeed", seq_len=2048, global_batch=1280
    )
    half = predict(asked, parse_layout("shard320,zero3,mbs4,full", 320))
    whole = predict(asked.on(cluster("a100:640")), parse_layout("shard640,zero3,mbs2,full", 640))
    assert kept(Point(320, half, 1.0), Point(640, whole, None)) > CLIFF


def _expert_run(chips: int, reached_bytes_s: float) -> Gap:
    """DeepSeek-V3 with experts over all of `chips`, as it runs where a chip's dispatch to other
    nodes reaches so much."""
    asked = question("deepseek-v3", f"p5e:{chips}", seq_len=4096, global_batch=16 * chips)
    layout = parse_layout(f"ep{chips},zero1,mbs1", chips)
    inner, *outer = asked.cluster.levels
    nameplate = reached_bytes_s / asked.constants.values["network"]
    levels = (inner, *(replace(level, bandwidth_bytes_s=nameplate) for level in outer))
    there = asked.on(replace(asked.cluster, levels=levels))
    return gap(asked, layout, predict(there, layout).step_time_s, None)


def test_case_33_experts_over_four_nodes_at_a_quarter_of_the_line_rate() -> None:
    """deepseek-ai/DeepEP#493: H200, 400 Gb/s a chip: 40.9 GB/s on 2 nodes, 12.3 on 4."""
    sound, ill = _expert_run(16, 40.9e9), _expert_run(32, 12.3e9)
    assert not any("fabric" in line for line in sound.diagnosis)
    blamed = next(line for line in ill.diagnosis if "fabric" in line)
    share = re.search(r"runs at (\d+)% of the bandwidth", blamed)
    assert "expert traffic" in blamed and share and 30 <= int(share[1]) <= 45


def test_case_33_the_network_is_not_blamed_where_nothing_goes_over_it() -> None:
    asked = question("llama3-8b", "p5e:8", seq_len=8192, global_batch=64)
    layout = parse_layout("dp8,zero1,mbs1", 8)
    slow = gap(asked, layout, 2 * predict(asked, layout).step_time_s, None)
    assert "above the interval" in slow.diagnosis[0]
    assert not any("fabric" in line for line in slow.diagnosis)
