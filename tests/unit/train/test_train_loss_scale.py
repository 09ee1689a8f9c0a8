"""Dynamic loss scaling, arXiv 1710.03740."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate

import pytest

from meshwright.train.precision.scaling import LossScale, LossScaleSettings

SETTINGS = LossScaleSettings()
Rule = Callable[[LossScale, bool, LossScaleSettings], LossScale]


def scales(rule: Rule, start: LossScale, steps: list[bool]) -> list[float]:
    """The scale before each step and after the last."""
    states = accumulate(steps, lambda state, ok: rule(state, ok, SETTINGS), initial=start)
    return [state.scale for state in states]


def check_growth(rule: Rule) -> None:
    """It doubles after exactly 2000 good steps in a row, and an overflow starts the count again."""
    start = LossScale(1024.0)
    assert scales(rule, start, [True] * 2000)[-2:] == [1024.0, 2048.0]
    interrupted = scales(rule, start, [True] * 1999 + [False] + [True] * 2000)
    assert interrupted[1999:2001] == [1024.0, 512.0]
    assert interrupted[-2:] == [512.0, 1024.0]


def test_doubles_after_2000_good_steps_in_a_row() -> None:
    check_growth(LossScale.after)


@pytest.mark.parametrize(
    "faulty",
    [
        lambda state, ok, s: LossScale(state.after(ok, s).scale, state.good_steps + 1),
        lambda state, _, s: state.after(True, s),
        lambda state, ok, s: state if ok else state.after(ok, s),
    ],
    ids=["count not restarted", "overflow ignored", "never grows"],
)
def test_a_faulty_rule_is_seen(faulty: Rule) -> None:
    with pytest.raises(AssertionError):
        check_growth(faulty)


def test_halves_down_to_the_floor_and_doubles_up_to_the_ceiling() -> None:
    assert scales(LossScale.after, LossScale(4.0), [False] * 4) == [4.0, 2.0, 1.0, 1.0, 1.0]
    top = LossScale(SETTINGS.largest, SETTINGS.interval - 1)
    assert top.after(True, SETTINGS) == LossScale(2.0**24, 0)


def test_survives_a_checkpoint() -> None:
    state = LossScale.start(SETTINGS).after(True, SETTINGS)
    assert state == LossScale(2.0**16, 1)
    assert LossScale.from_json(json.loads(json.dumps(state.as_json()))) == state
