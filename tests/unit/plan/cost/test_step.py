"""A step: parts add up, bounds hold, more work takes longer."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from time_help import speed, timed, work

from meshwright.catalog.load import cluster
from meshwright.plan.cost.candidates import FULL, INTERLEAVED, Candidates
from meshwright.plan.cost.constants import Constants
from meshwright.plan.cost.framework import framework
from meshwright.plan.cost.step import PARTS, step_parts, step_time

AXES = st.sampled_from([1, 2, 4, 8])
MODELS = st.sampled_from(["llama3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt3-6.7b"])


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    return Candidates.of(
        1,
        dp_shard=draw(AXES),
        tp=draw(AXES),
        cp=draw(st.sampled_from([1, 2])),
        pp=draw(st.sampled_from([1, 2, 4])),
        micro_batch=draw(st.sampled_from([1, 2, 4])),
        zero=draw(st.sampled_from([0, 1, 3])),
        recompute=draw(st.sampled_from([0, 1, 2, 3, FULL])),
        sp=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=60)
@given(candidates(), MODELS)
def test_no_step_beats_the_roofline(c: Candidates, model: str) -> None:
    job = work(model, 2048, 256)
    chips = cluster("h100:8").chip
    found = step_time(job, cluster(f"h100:{max(8, int(c.world[0]))}"), c)
    least = job.tokens * job.spec.flops_per_token(2048) / c.world / chips.peak("bf16")
    assert found.step_s > least
    assert found.low_s < found.step_s < found.high_s


@settings(deadline=None, max_examples=60)
@given(candidates(), MODELS)
def test_parts_are_seconds_that_add_up(c: Candidates, model: str) -> None:
    found = step_time(work(model, 2048, 256), cluster("h100:512"), c)
    assert set(found.parts) == set(PARTS)
    for name, seconds in found.parts.items():
        assert seconds >= -1e-12, name
    assert sum(part.item() for part in found.parts.values()) == pytest.approx(found.step_s.item())


@settings(deadline=None, max_examples=40)
@given(candidates(), MODELS)
def test_more_tokens_are_never_faster(c: Candidates, model: str) -> None:
    few, many, longer = (
        step_time(work(model, length, batch), cluster("h100:512"), c).step_s
        for length, batch in ((1024, 256), (1024, 512), (2048, 256))
    )
    assert few < many
    assert few < longer


def test_many_candidates_are_the_same_as_one_by_one() -> None:
    job, where = work("llama3-70b", 4096, 256), cluster("h100:512")
    many = Candidates.of(4, tp=[1, 2, 4, 8], pp=[8, 4, 2, 1], dp_shard=4, zero=1)
    together = step_time(job, where, many).step_s
    alone = [step_time(job, where, many.take([i])).step_s.item() for i in range(4)]
    np.testing.assert_allclose(together, alone)


def test_interleaving_shortens_the_bubble_and_sends_more() -> None:
    job = work("llama3-70b", 4096, 64)
    plain = timed(job, "h100:64", tp=4, pp=8, dp_shard=2, zero=1).parts
    chunks = timed(
        job, "h100:64", tp=4, pp=8, dp_shard=2, zero=1, vpp=5, schedule=INTERLEAVED
    ).parts
    assert chunks["bubble"] == pytest.approx(plain["bubble"] / 5, rel=0.2)
    assert chunks["p2p"] > 2 * plain["p2p"]


def test_full_expert_ranks_slow_a_step_down() -> None:
    even, skewed = (
        timed(work("mixtral-8x7b", 4096, 64, imbalance=phi), "h100:16", dp_shard=16, ep=8, zero=1)
        for phi in (1.0, 2.0)
    )
    assert skewed.step_s > 1.2 * even.step_s


def test_slower_chips_and_networks_take_longer() -> None:
    job = work("llama3-8b", 4096, 256)
    layout: dict[str, Any] = {"dp_shard": 64}
    assert speed(job, "a100:64", **layout) < speed(job, "h100:64", **layout)
    assert speed(job, "h100:64", **layout) < speed(job, "b200:64", **layout)
    assert speed(job, "p4de:64", **layout) < speed(job, "a100:64", **layout)


def test_chips_that_nobody_measured_have_the_wider_interval() -> None:
    job = work("llama3-8b", 4096, 256)
    known = timed(job, "h100:64", dp_shard=64)
    stranger = timed(job, "gaudi3:64", dp_shard=64)
    assert known.origin == "measured"
    assert stranger.origin == "assumed"
    assert "product.any" in stranger.assumed
    assert stranger.high_s / stranger.step_s > known.high_s / known.step_s


def test_h200_stands_on_what_was_measured_on_h100() -> None:
    assert Constants.shipped().origin("h200") == "interpolated"


def test_software_of_a_framework_follows_its_entry() -> None:
    known = Constants.shipped()
    assert known.software(framework("megatron")).tp_overlap
    assert not known.software(framework("megatron-2021")).dp_overlap
    assert known.software(framework("torchtitan"), flash=False).attention == "unfused"


def test_20000_layouts_take_less_than_a_second() -> None:
    """Half of what a search may take; the other half is memory. Best of three: the machine is
    shared."""
    rng = np.random.default_rng(0)
    count = 20_000
    many = Candidates.of(
        count,
        tp=rng.choice([1, 2, 4, 8], count),
        pp=rng.choice([1, 2, 4, 8], count),
        dp_shard=rng.choice([8, 16], count),
        micro_batch=rng.choice([1, 2, 4], count),
        zero=rng.choice([1, 3], count),
    )
    job, where = work("llama3-70b", 8192, 512), cluster("h100:1024")
    took = []
    for _ in range(3):
        start = time.process_time()
        step_parts(job, where, many)
        took.append(time.process_time() - start)
    assert min(took) < 1.0


def test_a_short_backward_hides_little_of_the_gradients() -> None:
    """What runs beside compute needs compute to run beside."""
    short, long = (
        timed(work("llama3-8b", length, 64), "p4de:64", dp_shard=64, zero=1).parts["dp"]
        for length in (128, 8192)
    )
    assert short > 1.5 * long
