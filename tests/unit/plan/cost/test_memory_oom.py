"""The probability of running out: bounds, order, and what each uncertainty does."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.models.presets import preset
from meshwright.plan.cost.candidates import Candidates
from meshwright.plan.cost.framework import framework
from meshwright.plan.cost.memory import Memory, memory
from meshwright.plan.cost.oom import (
    BALANCED,
    NATURAL,
    Imbalance,
    interval,
    normal_below,
    normal_quantile,
    oom_probability,
)
from meshwright.plan.cost.workload import Workload

MEGATRON = framework("megatron")
bounded = settings(deadline=None, max_examples=60)


def _memory(model: str = "mixtral-8x7b") -> Memory:
    work = Workload(preset(model), 4096, 256, "bf16", MEGATRON)
    return memory(work, Candidates.of(1, dp_shard=8, tp=2, pp=4, ep=8, zero=1))


@pytest.mark.parametrize("x", [-6.0, -1.3, -0.01, 0.0, 0.4, 2.0, 5.0])
def test_normal_distribution(x: float) -> None:
    below = NormalDist().cdf(x)
    assert normal_below(np.array([x]))[0] == pytest.approx(below, abs=2e-7)
    if 1e-3 < below < 1 - 1e-3:
        assert normal_quantile(np.array([below]))[0] == pytest.approx(x, abs=1e-4)


@bounded
@given(st.floats(5e9, 300e9), st.floats(1.0, 1.5))
def test_more_capacity_is_never_more_risk(capacity: float, factor: float) -> None:
    found = _memory()
    less = oom_probability(found, MEGATRON, capacity)[0]
    more = oom_probability(found, MEGATRON, capacity * factor)[0]
    assert 0 <= more <= less + 1e-9 <= 1 + 2e-9


def test_certain_at_both_ends_and_even_at_the_median() -> None:
    found = _memory()
    total = found.total_bytes[0]
    assert oom_probability(found, MEGATRON, total / 2)[0] > 0.999
    assert oom_probability(found, MEGATRON, total * 2)[0] < 0.001
    assert oom_probability(found, MEGATRON, total)[0] == pytest.approx(0.5, abs=0.01)


def test_a_reserve_is_as_good_as_less_capacity() -> None:
    found = _memory()
    total = found.total_bytes[0]
    assert oom_probability(found, MEGATRON, 1.1 * total, reserve_bytes=0.1 * total) == (
        pytest.approx(oom_probability(found, MEGATRON, total))
    )


def test_risk_grows_with_imbalance_and_a_capacity_factor_bounds_it() -> None:
    """User case 24: dropless routing runs out early, dropping tokens is a remedy."""
    found = _memory()
    room = 1.1 * found.total_bytes[0]
    risks = [
        oom_probability(found, MEGATRON, room, Imbalance(median, 1.5 * median))[0]
        for median in (1.0, 1.5, 2.0, 3.0)
    ]
    assert risks == sorted(risks)
    assert risks[-1] > 0.9 > 0.3 > oom_probability(found, MEGATRON, room, BALANCED)[0]
    capped = replace(NATURAL, cap=1.0)
    assert (
        oom_probability(found, MEGATRON, room, capped)[0]
        < (oom_probability(found, MEGATRON, room, NATURAL)[0])
    )


def test_dense_models_do_not_care_about_experts() -> None:
    found = _memory("llama3-8b")
    room = found.total_bytes[0]
    assert oom_probability(found, MEGATRON, room, NATURAL) == (
        pytest.approx(oom_probability(found, MEGATRON, room))
    )


def test_an_imbalance_that_was_priced_is_not_counted_twice() -> None:
    work = Workload(preset("mixtral-8x7b"), 4096, 256, "bf16", MEGATRON, imbalance=2.0)
    c = Candidates.of(1, dp_shard=8, tp=2, pp=4, ep=8, zero=1)
    skewed = memory(work, c)
    twice = Imbalance(2.0, 2.0)
    risk = oom_probability(skewed, MEGATRON, skewed.total_bytes[0], twice, priced_imbalance=2.0)
    assert risk[0] == pytest.approx(0.5, abs=0.02)


def test_loads_have_the_quantiles_that_were_asked_for() -> None:
    loads = np.sort(NATURAL.loads())
    assert np.median(loads) == pytest.approx(NATURAL.median, rel=0.02)
    assert np.mean(loads > NATURAL.p95) == pytest.approx(0.05, abs=0.03)
    assert NATURAL.mean > NATURAL.median
    assert BALANCED.mean == 1.0


def test_interval_holds_the_prediction_and_widens_with_less_knowledge() -> None:
    found = _memory()
    low, high = interval(found, MEGATRON)
    assert low[0] < found.total_bytes[0] < high[0]
    wide = interval(found, replace(MEGATRON, sigma=0.3))
    assert wide[1][0] - wide[0][0] > high[0] - low[0]


def test_nothing_uncertain_is_a_step() -> None:
    sure = replace(MEGATRON, sigma=0.0, slack_sigma=0.0)
    found = _memory()
    total = found.total_bytes[0]
    assert oom_probability(found, sure, total * 1.001)[0] == 0
    assert oom_probability(found, sure, total * 0.999)[0] == 1
