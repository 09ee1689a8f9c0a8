"""Failures, checkpoints and spares, and what they cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_questions import question

from meshwright.catalog import cluster
from meshwright.checkpoint.interval import daly_interval_s
from meshwright.plan.goodput import (
    FAILURES_PER_NODE_DAY,
    Reliability,
    bill,
    checkpoint_s,
    goodput,
    spares_of,
)

LLAMA = question("llama3-405b", "h100:16384")


def test_llama_3_fails_every_three_hours_and_is_over_90_percent_productive() -> None:
    """arXiv 2407.21783, 3.3.4: 419 unplanned stops in 54 days, effective time above 90 %."""
    found = goodput(LLAMA, Reliability())
    assert found.mtbf_h == pytest.approx(54 * 24 / 419, rel=1e-6)
    assert 0.88 < found.share < 0.97


@given(st.floats(1, 100), st.floats(1e4, 1e7))
def test_daly_is_young_where_writes_are_short(write_s: float, mtbf_s: float) -> None:
    young = math.sqrt(2 * write_s * mtbf_s)
    found = daly_interval_s(write_s, mtbf_s)
    assert found == pytest.approx(young - write_s, rel=0.5)
    if write_s < mtbf_s / 1e4:
        assert found == pytest.approx(young, rel=0.02)


def test_daly_where_a_write_takes_longer_than_two_failures() -> None:
    assert daly_interval_s(100.0, 40.0) == 40.0


def _share(interval_s: float, write_s: float, mtbf_s: float, restart_s: float) -> float:
    overhead = write_s / interval_s + (restart_s + interval_s / 2 + write_s) / mtbf_s
    return 1 / (1 + overhead)


def test_no_other_interval_is_better_by_much() -> None:
    found = goodput(LLAMA, Reliability())
    mtbf_s = found.mtbf_h * 3600
    shares = [
        _share(found.interval_s * factor, found.write_s, mtbf_s, found.restart_s)
        for factor in (0.3, 0.5, 0.8, 1.0, 1.25, 2.0, 3.0)
    ]
    assert found.share == pytest.approx(shares[3])
    assert found.share > max(shares) - 1e-3
    assert shares[0] < shares[3] > shares[-1]


@given(st.floats(1e-5, 1e-1), st.floats(1.1, 10))
def test_more_failures_are_never_better(rate: float, factor: float) -> None:
    few = goodput(LLAMA, Reliability(failures_per_node_day=rate))
    many = goodput(LLAMA, Reliability(failures_per_node_day=rate * factor))
    assert 0 < many.share <= few.share < 1


def test_spares_shorten_restarts_and_cost_money() -> None:
    none, some = (bill(LLAMA, 1e6, 1e12, Reliability(spares=n)) for n in (0, 2))
    assert some.days < none.days
    assert some.goodput.restart_s < none.goodput.restart_s
    priced = question("llama3-405b", "p5:1024")
    one, two = (bill(priced, 1e6, 1e12, Reliability(spares=n)) for n in (0, 4))
    assert one.dollars and two.dollars
    assert two.dollars / one.dollars == pytest.approx(
        (1024 + 64) / 1024 * two.days / one.days, rel=1e-9
    )


def test_spares_are_used_up_where_failures_come_faster_than_repairs() -> None:
    slow = Reliability(spares=1, repair_s=30 * 86_400)
    quick = replace(slow, repair_s=60.0)
    assert goodput(LLAMA, quick).restart_s == pytest.approx(120, rel=0.01)
    assert goodput(LLAMA, slow).restart_s > 200


def test_units() -> None:
    assert spares_of(1024, 1) == 16 and spares_of(8, 1) == 1
    assert checkpoint_s(LLAMA.spec, 2048, 2e9) == pytest.approx(405.85e9 * 14 / 4.096e12, rel=1e-3)
    assert pytest.approx(3.79e-3, rel=0.01) == FAILURES_PER_NODE_DAY
    local = question("tiny", "local:8").on(cluster("local:8"))
    assert bill(local, 1e3, 1e6, Reliability()).dollars is None
