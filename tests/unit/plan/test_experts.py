"""Placement of experts: policy and trigger."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.plan.experts import (
    PATIENCE_STEPS,
    REST_STEPS,
    Placement,
    Trigger,
    imbalance,
    initial,
    rebalance,
)


@st.composite
def loaded_placements(draw: st.DrawFn) -> tuple[list[float], Placement]:
    """Loads of 1 to 16 experts and a random placement with up to 8 replicas on 1 to 4 ranks."""
    n_experts, ep = draw(st.integers(1, 16)), draw(st.integers(1, 4))
    spare = -n_experts % ep + ep * draw(st.integers(0, 2))
    extra = draw(st.lists(st.integers(0, n_experts - 1), min_size=spare, max_size=spare))
    experts = draw(st.permutations([*range(n_experts), *extra]))
    loads = draw(st.lists(st.integers(0, 1000), min_size=n_experts, max_size=n_experts))
    return [float(load) for load in loads], Placement(tuple(experts), ep)


@settings(deadline=None)
@given(loaded_placements())
def test_a_new_placement_is_whole_and_better(case: tuple[list[float], Placement]) -> None:
    loads, old = case
    new = rebalance(loads, old)
    if new is None:
        return
    assert set(new.experts) == set(range(len(loads)))
    assert len(new.experts) == len(old.experts)
    assert new.ep == old.ep
    assert all(len(new.on(rank)) == old.per_rank for rank in range(new.ep))
    assert imbalance(loads, new) < imbalance(loads, old)


@settings(deadline=None)
@given(loaded_placements())
def test_imbalance_is_between_even_and_all_on_one_rank(
    case: tuple[list[float], Placement],
) -> None:
    loads, placement = case
    assert 1 - 1e-9 <= imbalance(loads, placement) <= placement.ep + 1e-9


def test_imbalance_by_hand() -> None:
    placement = Placement((0, 1, 2, 3), ep=2)
    assert imbalance([3, 3, 1, 1], placement) == 1.5
    assert imbalance([0, 0, 0, 0], placement) == 1.0
    # Half of expert 0's tokens go to either place.
    assert imbalance([8, 0, 0], Placement((0, 1, 0, 2), ep=2)) == 1.0


def test_two_hot_experts_of_one_rank_are_parted() -> None:
    new = rebalance([10, 10, 1, 1], initial(4, 0, 2))
    assert new is not None
    assert imbalance([10, 10, 1, 1], new) == 1.0


def test_the_hottest_expert_gets_the_replica() -> None:
    loads = [1.0, 1.0, 1.0, 1.0, 1.0, 15.0]
    new = rebalance(loads, initial(6, 2, 2))
    assert new is not None
    assert 5 in new.replicated
    assert {place // new.per_rank for place in new.places[5]} == {0, 1}


def test_an_even_load_stays() -> None:
    assert rebalance([5.0] * 8, initial(8, 0, 4)) is None
    assert rebalance([0.0] * 8, initial(8, 0, 4)) is None


def test_first_placement_is_in_order_with_replicas_elsewhere() -> None:
    assert initial(4, 0, 2).experts == (0, 1, 2, 3)
    assert initial(4, 2, 2) == Placement((0, 1, 2, 3, 0, 1), ep=2)
    assert initial(4, 2, 2).places == ((0, 4), (1, 5), (2,), (3,))
    with pytest.raises(ValueError, match="do not divide"):
        initial(5, 0, 2)
    with pytest.raises(ValueError, match="no place"):
        Placement((0, 2), ep=1)


def test_trigger_waits_for_steps_in_a_row_and_rests_after() -> None:
    placement, uneven, even = initial(4, 0, 2), [3.0, 3.0, 1.0, 1.0], [1.0] * 4
    trigger = Trigger()
    for loads in [uneven] * (PATIENCE_STEPS - 1) + [even]:
        trigger = trigger.after(loads, placement, 1.2)
        assert not trigger.due
    for step in range(PATIENCE_STEPS):
        assert not trigger.due
        trigger = trigger.after([3.0, 3.0, 1.0, float(step % 2)], placement, 1.2)
    assert trigger.due
    assert trigger.mean_loads == (3.0, 3.0, 1.0, 0.5)
    for _ in range(REST_STEPS + PATIENCE_STEPS - 1):
        trigger = trigger.after(uneven, placement, 1.2)
        assert not trigger.due
    assert trigger.after(uneven, placement, 1.2).due


def test_trigger_of_zero_never_fires() -> None:
    trigger = Trigger()
    for _ in range(2 * PATIENCE_STEPS):
        trigger = trigger.after([9.0, 0.0], initial(2, 0, 2), 0.0)
    assert not trigger.due
