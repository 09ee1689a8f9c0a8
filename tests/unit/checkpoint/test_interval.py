"""Commits come as often as their cost and the failures ask for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint.interval import daly_interval_s

DAY_S = 86_400.0


@settings(deadline=None)
@given(st.floats(1e-4, 1e4), st.floats(60, 1e7))
def test_no_other_interval_costs_much_less(write_s: float, mtbf_s: float) -> None:
    """Daly's optimum is of a model with terms of higher order, so it is not quite this one's."""

    def cost(every_s: float) -> float:
        return write_s / every_s + every_s / 2 / mtbf_s

    every_s = daly_interval_s(write_s, mtbf_s)
    if write_s < mtbf_s / 50:
        assert cost(every_s) < min(cost(2 * every_s), cost(every_s / 2))


def test_a_longer_write_asks_for_a_longer_interval() -> None:
    assert daly_interval_s(2.0, DAY_S) == pytest.approx(math.sqrt(4 * DAY_S), rel=0.01)
    assert daly_interval_s(2 * DAY_S, DAY_S) == DAY_S
