"""Errors say what is wrong in one line, and the process exits with what the line means."""

from __future__ import annotations

import pytest

from meshwright.base import errors


@pytest.mark.parametrize(
    "error, code",
    [
        (errors.InputError("x"), 2),
        (errors.ConfigError("layout.tp", 3, "does not divide"), 2),
        (errors.DataError("x"), 2),
        (errors.CheckpointError("x"), 1),
        (errors.RunError("x"), 1),
        (errors.RankLostError("x"), 1),
    ],
)
def test_exit_code_is_2_for_wrong_input_else_1(error: errors.MeshwrightError, code: int) -> None:
    assert error.exit_code == code


def test_config_error_names_key_value_and_fix() -> None:
    error = errors.ConfigError("layout.tp", "two", "give a whole number")
    assert str(error) == "layout.tp = 'two': give a whole number"
    assert (error.key, error.value, error.fix) == ("layout.tp", "two", "give a whole number")


def test_near_miss_is_offered_and_a_far_one_is_not() -> None:
    assert errors.did_you_mean("hiden", ["heads", "hidden"]) == '; did you mean "hidden"?'
    assert errors.did_you_mean("zzz", ["heads", "hidden"]) == ""
