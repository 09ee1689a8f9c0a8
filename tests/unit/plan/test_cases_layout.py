"""Cases of ../shared/cases/planner.md on choosing a layout that no other test covers, by number.

Figures are those of the threads. Cases 2, 3, 7, 29, 31 and 32 as the search decides them are in
test_search.py, speeds in cost/test_time_cases.py, shortfalls in test_explain.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_questions import question

from meshwright.catalog import cluster
from meshwright.models.presets import preset
from meshwright.models.spec import ModelSpec
from meshwright.plan.cost.candidates import FULL, INTERLEAVED, MLP, NONE, Candidates
from meshwright.plan.cost.framework import framework
from meshwright.plan.cost.step import step_time
from meshwright.plan.cost.workload import Workload
from meshwright.plan.explain import compare
from meshwright.plan.explain_gap import gap
from meshwright.plan.prediction import predict
from meshwright.plan.search_notation import parse_layout
from meshwright.plan.search_question import Question

NEOX = ModelSpec(family="gpt2", layers=44, hidden=6144, heads=64, vocab=50432, max_seq_len=2048)


def _neox(batch: int) -> Question:
    asked = question(
        "gpt2", "a100:128", framework="megatron-deepspeed", seq_len=2048, global_batch=batch
    )
    return replace(asked, spec=NEOX)


def test_case_1_few_micro_batches_are_what_is_wrong_with_the_pipeline() -> None:
    """EleutherAI/gpt-neox#903: 20B on 128 chips, PP1 x TP2 170 TFLOPS, PP4 x TP2 33."""
    asked = _neox(128)
    flat = predict(asked, parse_layout("tp2,nosp,zero1,mbs1,full", 128))
    piped = predict(asked, parse_layout("tp2,pp4,nosp,zero1,mbs8,full", 128))
    assert flat.tflops_per_chip > 2 * piped.tflops_per_chip
    said = compare(asked, flat, piped).verdict
    assert "pipeline bubble" in said and "too few micro-batches (1) for 4 stages" in said
    slow = gap(asked, piped.layout, piped.step_time_s, None)
    assert any("too few micro-batches (1) for 4 stages" in line for line in slow.diagnosis)


def test_case_1_with_many_micro_batches_nothing_is_flagged() -> None:
    asked = _neox(2048)
    piped = predict(asked, parse_layout("tp2,pp4,nosp,zero1,mbs1,full", 128))
    found = gap(asked, piped.layout, piped.step_time_s, None)
    assert not any("micro-batches" in line for line in found.diagnosis)


def _mixtral(name: str, **layout: Any) -> Any:
    work = Workload(preset("mixtral-8x7b"), 4096, 256, "bf16", framework(name))
    return step_time(work, cluster("h100:16"), Candidates.of(1, zero=1, **layout))


def test_case_2_gathering_all_tokens_costs_more_than_sending_each_where_it_goes() -> None:
    """NVIDIA/Megatron-LM#756: 130 to 230 TFLOPS with `alltoall`, EP8 x TP2 and newer kernels. Two
    of eight experts: an all-gather moves four times as much."""
    spread = {"tp": 2, "ep": 8, "dp_shard": 8}
    sent, gathered = _mixtral("megatron", **spread), _mixtral("megatron-allgather", **spread)
    assert gathered.step_s > 1.02 * sent.step_s
    assert gathered.parts["ep"] == pytest.approx(4 * sent.parts["ep"], rel=0.15)
    slices = {"tp": 8, "ep": 2, "etp": 8, "dp_shard": 2}
    together = (
        _mixtral("megatron-allgather", **slices).step_s / _mixtral("megatron", **slices).step_s
    )
    assert together == pytest.approx(1.0, abs=0.005)  # two ranks: either way all goes to the other


def test_case_2_the_interval_bounds_what_is_reasonable() -> None:
    """230 TFLOPS reached; the user asks what more there is."""
    asked = question("mixtral-8x7b", "h100:16", seq_len=4096, global_batch=256)
    here = predict(asked, parse_layout("tp2,ep8,dp8,zero1,mbs1", 16))
    most = asked.flops_per_chip / here.step_time_low_s
    least = asked.flops_per_chip / here.step_time_high_s
    assert least < 230e12 < most < 0.5 * asked.peak_flops


# Pai-Megatron-Patch#658: micro-batch, global batch, tp, recomputation, tokens/s a chip.
QWEN_ROWS = (
    (4, 4096, 1, FULL, 1541),
    (4, 4096, 2, FULL, 1507),
    (1, 2048, 2, NONE, 1462),
    (1, 2048, 1, MLP, 1428),
)


def _qwen(micro: int, batch: int, tp: int, recompute: int) -> float:
    work = Workload(preset("qwen3-235b-a22b"), 4096, batch, "bf16", framework("megatron"))
    c = Candidates.of(
        1, tp=tp, pp=32, vpp=3, schedule=INTERLEAVED, ep=8, dp_shard=8 // tp, zero=1,
        micro_batch=micro, recompute=recompute,
    )  # fmt: skip
    return float(work.tokens / step_time(work, cluster("h800:256"), c).step_s[0] / 256)


def test_case_5_order_of_qwen3_on_256_h800() -> None:
    """Three of four in order, all within a quarter. What is not reproduced: the third above the
    fourth, which measured 2 % apart (validation/RESULTS.md, user cases)."""
    found = [_qwen(*row[:4]) for row in QWEN_ROWS]
    assert found[0] > found[1] > found[3]
    assert found[1] > found[2]
    assert found[1] == pytest.approx(found[0], rel=0.03)
    assert max(found) < 1.2 * min(found)
    for speed, row in zip(found, QWEN_ROWS, strict=True):
        assert speed == pytest.approx(row[4], rel=0.25)


def test_case_5_an_expert_half_made_again_sends_its_tokens_again() -> None:
    """`--recompute-modules moe` takes dispatch and combine with it, and all their kernels."""
    work = Workload(preset("qwen3-235b-a22b"), 4096, 2048, "bf16", framework("megatron"))
    c = Candidates.of(2, pp=32, ep=8, dp_shard=8, zero=1, recompute=[NONE, MLP])
    parts = step_time(work, cluster("h800:256"), c).parts
    assert parts["ep"][1] == pytest.approx(1.5 * parts["ep"][0])
