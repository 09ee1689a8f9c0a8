"""1F1B executed by a small simulator whose sends never block."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.plan.schedule import Action, one_f_one_b

Schedules = list[list[Action]]
stage_counts, batch_counts = st.integers(1, 9), st.integers(1, 20)


def _all_stages(stages: int, micro_batches: int) -> Schedules:
    return [one_f_one_b(stage, stages, micro_batches) for stage in range(stages)]


def _needs(stage: int, stages: int, action: Action) -> list[tuple[int, Action]]:
    """What must have ended, and where, before `action` can begin on `stage`."""
    if action.kind == "forward":
        return [(stage - 1, action)] if stage else []
    own = (stage, Action("forward", action.micro_batch))
    return [own, (stage + 1, action)] if stage + 1 < stages else [own]


def _simulate(schedules: Schedules) -> int:
    """Time until every stage is done, an action taking 1. Fails if the stages wait in a circle."""
    stages = len(schedules)
    ended: dict[tuple[int, Action], int] = {}
    free, position = [0] * stages, [0] * stages
    progressed = True
    while progressed:
        progressed = False
        for stage, actions in enumerate(schedules):
            while position[stage] < len(actions):
                action = actions[position[stage]]
                needs = _needs(stage, stages, action)
                if any(need not in ended for need in needs):
                    break
                free[stage] = 1 + max([free[stage], *(ended[need] for need in needs)])
                ended[stage, action] = free[stage]
                position[stage] += 1
                progressed = True
    assert len(ended) == sum(len(actions) for actions in schedules), "stages wait in a circle"
    return max(free)


@settings(deadline=None)
@given(stage_counts, batch_counts)
def test_every_micro_batch_goes_forward_once_and_back_once_after_it(
    stages: int, micro_batches: int
) -> None:
    for order in _all_stages(stages, micro_batches):
        assert len(order) == len(set(order)) == 2 * micro_batches
        for micro_batch in range(micro_batches):
            forward = order.index(Action("forward", micro_batch))
            assert forward < order.index(Action("backward", micro_batch))


@settings(deadline=None)
@given(stage_counts, batch_counts)
def test_micro_batches_in_flight_are_bounded_by_the_stages_to_come(
    stages: int, micro_batches: int
) -> None:
    for stage, order in enumerate(_all_stages(stages, micro_batches)):
        in_flight = peak = 0
        for action in order:
            in_flight += 1 if action.kind == "forward" else -1
            peak = max(peak, in_flight)
        assert peak == min(stages - stage, micro_batches)


@settings(deadline=None)
@given(stage_counts, batch_counts)
def test_stages_never_wait_in_a_circle_and_the_bubble_is_stages_minus_one(
    stages: int, micro_batches: int
) -> None:
    assert _simulate(_all_stages(stages, micro_batches)) == 2 * (micro_batches + stages - 1)


def test_the_simulator_sees_a_circle() -> None:
    """The first stage waits for backward 0, the last for forward 1."""
    forward_0, forward_1, backward_0, backward_1 = one_f_one_b(0, 2, 2)
    first = [forward_0, backward_0, forward_1, backward_1]
    last = [forward_0, forward_1, backward_0, backward_1]
    with pytest.raises(AssertionError, match="wait in a circle"):
        _simulate([first, last])


def test_one_stage_is_plain_accumulation() -> None:
    assert one_f_one_b(0, 1, 2) == [
        Action("forward", 0),
        Action("backward", 0),
        Action("forward", 1),
        Action("backward", 1),
    ]
