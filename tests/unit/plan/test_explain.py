"""Reasons: what bounds a step, why not another layout, where a shortfall comes from."""

from __future__ import annotations

import pytest
from plan_questions import question

from meshwright.base.errors import ConfigError
from meshwright.plan.explain import bound, compare, levers, neighbours
from meshwright.plan.explain_gap import gap, measured_step_s
from meshwright.plan.layout import Layout
from meshwright.plan.prediction import Prediction, layout_of, predict
from meshwright.plan.search import search
from meshwright.plan.search_notation import parse_layout
from meshwright.plan.search_question import Question

LLAMA_70B = question("llama2-70b", "h100:128", seq_len=4096, global_batch=128)


def _at(asked: Question, text: str) -> Prediction:
    return predict(asked, parse_layout(text, asked.cluster.chips))


def _best(asked: Question) -> Prediction:
    return predict(asked, layout_of(asked, search(asked).best.candidates, 0))


def test_parts_add_up_and_documents_have_the_keys_of_the_design() -> None:
    one = _best(LLAMA_70B)
    assert sum(one.time_parts.values()) == pytest.approx(one.step_time_s)
    assert sum(one.memory_parts.values()) == pytest.approx(one.memory_bytes)
    wanted = {
        "step_time_s", "tokens_per_s_per_chip", "mfu", "memory_bytes", "memory_parts",
        "oom_probability", "time_parts", "assumptions",
    }  # fmt: skip
    assert wanted <= one.document().keys()
    assert one.step_time_low_s < one.step_time_s < one.step_time_high_s
    assert one.memory_low_bytes < one.memory_bytes < one.memory_high_bytes
    flops = LLAMA_70B.spec.flops_per_token(4096) * one.tokens_per_s_per_chip
    assert one.mfu == pytest.approx(flops / 989e12, rel=1e-3)
    price = LLAMA_70B.cluster.price_per_chip_hour
    assert price is not None
    dollars = 1e12 / one.tokens_per_s_per_chip / 3600 * price
    assert one.dollars_per_trillion_tokens == pytest.approx(dollars)


def test_a_bubble_is_named_where_it_is_what_bounds() -> None:
    few = question("llama2-70b", "h100:128", seq_len=4096, global_batch=4)
    assert bound(_at(few, "tp4,pp16,dp2,mbs2")).startswith("pipeline bubble")
    assert bound(_best(LLAMA_70B)).startswith("compute")


def test_case_3_the_gap_is_recomputation_and_bubble() -> None:
    """Megatron-LM#1031: 296.5 TFLOP/s where the README has 420.5."""
    given = parse_layout("tp8,pp8,dp2,mbs1,full", 128)
    seconds = measured_step_s(LLAMA_70B, "tflops=296.5")
    found = gap(LLAMA_70B, given, seconds, _best(LLAMA_70B))
    assert sum(found.seconds.values()) == pytest.approx(seconds)
    share = found.seconds["recomputation"] / seconds
    assert 0.15 < share < 0.3
    assert found.seconds["pipeline bubble"] / seconds > 0.05
    said = " ".join(found.diagnosis)
    assert "recomputation costs" in said and "faster on the same chips" in said


@pytest.mark.parametrize(
    ("model", "where", "layout", "measured", "batch"),
    [
        # fms-fsdp#78: 7B on 64 H100, HSDP, 1,000 instead of 7,500 tokens/s a chip.
        ("llama2-7b", "h100:64", "shard8,zero3,mbs2", "tokens_per_s_per_chip=1000", 128),
        # torchtitan#676: 70B on 32 H200, 200 tokens/s a chip or so.
        ("llama3-70b", "h200:32", "fsdp32,mbs1,full", "tokens_per_s_per_chip=200", 64),
    ],
)
def test_cases_28_and_34_name_the_network_path(
    model: str, where: str, layout: str, measured: str, batch: int
) -> None:
    asked = question(model, where, framework="fsdp", seq_len=4096, global_batch=batch)
    given = parse_layout(layout, asked.cluster.chips)
    found = gap(asked, given, measured_step_s(asked, measured), None)
    assert "network path" in found.diagnosis[0]


def test_a_run_within_the_interval_is_called_as_predicted() -> None:
    best = _best(LLAMA_70B)
    found = gap(LLAMA_70B, best.layout, 1.02 * best.step_time_s, best)
    assert found.diagnosis[0].startswith("as predicted")
    assert not any("faster on the same chips" in line for line in found.diagnosis)
    slow = gap(LLAMA_70B, best.layout, 1.5 * best.step_time_s, best)
    assert "above the interval" in slow.diagnosis[0]


def test_measured_in_any_unit_is_the_same_step() -> None:
    best = _best(LLAMA_70B)
    for text in (
        f"step_time_s={best.step_time_s}",
        f"tokens_per_s={best.tokens_per_s}",
        f"tokens_per_s_per_chip={best.tokens_per_s_per_chip}",
        f"tflops={best.tflops_per_chip}",
        f"mfu={best.mfu}",
    ):
        assert measured_step_s(LLAMA_70B, text) == pytest.approx(best.step_time_s)


@pytest.mark.parametrize(
    "text",
    ["tokens=3", "tflops", "mfu=x", "mfu=0", "mfu=-1", "mfu=inf", "mfu=1.01", "tflops=990"],
)
def test_wrong_measurements_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        measured_step_s(LLAMA_70B, text)


def test_comparisons_name_the_winner_the_tie_and_what_does_not_fit() -> None:
    best = _best(LLAMA_70B)
    slow = compare(LLAMA_70B, best, _at(LLAMA_70B, "tp8,pp8,dp2,mbs1,full"))
    assert "times as long, most of all in compute" in slow.verdict
    difference = slow.other.step_time_s - best.step_time_s
    assert sum(slow.seconds.values()) == pytest.approx(difference)
    assert compare(LLAMA_70B, best, best).verdict.startswith("a tie")
    heavy = compare(LLAMA_70B, best, _at(LLAMA_70B, "tp1,zero1,mbs1"))
    assert "does not fit" in heavy.verdict


def test_levers_are_priced_as_searches() -> None:
    best = _best(LLAMA_70B)
    found = {change.what: change for change in levers(LLAMA_70B, best)}
    fp8 = question("llama2-70b", "h100:128", seq_len=4096, global_batch=128, precision="fp8")
    speed = _best(fp8).tokens_per_s / best.tokens_per_s
    assert found["precision fp8"].speedup == pytest.approx(speed)
    assert all(change.speedup > 0.99 for change in found.values())
    speeds = [change.speedup for change in levers(LLAMA_70B, best)]
    assert speeds == sorted(speeds, reverse=True)


def test_neighbours_of_the_best_layout_that_fit_are_no_faster() -> None:
    best = _best(LLAMA_70B)
    assert all(one.speedup <= 1.0 + 1e-9 for one in neighbours(LLAMA_70B, best.layout) if one.fits)
    worse = neighbours(LLAMA_70B, parse_layout("tp8,pp8,dp2,mbs1,full", 128))
    assert worse[0].speedup > 1.1 and "recompute full" in worse[0].what


@pytest.mark.parametrize(
    ("layout", "key"),
    [
        (Layout(tp=8), "layout"),
        (Layout(dp_replicate=128, micro_batch=2), "global_batch"),
        (Layout(pp=128), "layout.pp"),
        (Layout(tp=128), "layout.tp"),
        (Layout(dp_replicate=128, ep=8), "layout.ep"),
        (Layout(pp=16, dp_replicate=8, vpp=8, schedule="interleaved"), "layout.vpp"),
        (Layout(dp_replicate=128, vpp=4, schedule="interleaved"), "layout.schedule"),
        (Layout(cp=128, zero=1, cp_method="ulysses"), "layout.cp"),
    ],
)
def test_layouts_that_cannot_be_are_refused(layout: Layout, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        predict(LLAMA_70B, layout)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("ep3", "layout.ep"),
        ("ep16", "layout.ep"),
        ("tp2,etp4", "layout.etp"),
        ("tp8,nosp,ep8", "layout.sp"),
        ("tp8,cp8", "layout"),
    ],
)
def test_experts_and_sequences_that_cannot_be_shared_out_are_refused(text: str, key: str) -> None:
    seq_len = 100 if key == "layout" else 4096
    asked = question("mixtral-8x7b", "p5:64", seq_len=seq_len, global_batch=64)
    with pytest.raises(ConfigError) as caught:
        _at(asked, text)
    assert caught.value.key == key


def test_no_pipeline_has_no_chunks() -> None:
    asked = question("llama2-70b", "h100:32", seq_len=4096, global_batch=32)
    moves = [one.what for one in neighbours(asked, parse_layout("tp8,pp2,vpp2,mbs1", 32))]
    assert "pp2 -> pp1" in moves


def test_a_batch_is_filled_in_for_the_longest_sequences() -> None:
    assert question("tiny", "p5:8", seq_len=2**40).global_batch == 1
