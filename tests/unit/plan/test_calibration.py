"""Constants of a user's own cluster, from what was measured there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_questions import job

from meshwright.base.errors import ConfigError
from meshwright.plan import calibration
from meshwright.plan.auto import question_of
from meshwright.plan.calibration import (
    FITTED,
    Measured,
    append_measurement,
    calibrated,
    fit,
    moved_by,
    path_of,
    read_calibration,
)
from meshwright.plan.cost.constants import Constants
from meshwright.plan.job import Job
from meshwright.plan.prediction import predict

JOB = job(dp_replicate=2, tp=2, pp=2, micro_batch=4)
SHIPPED = Constants.shipped()


def expected_step_time_s(job: Job) -> float:
    """What is predicted for `job` with what is known of its cluster."""
    return predict(question_of(job, calibrated(job.cluster.ref)), job.layout).step_time_s


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWRIGHT_CONFIG", str(tmp_path))
    return tmp_path


def _steps(seconds: float, count: int = 12) -> list[dict[str, float]]:
    """The first steps are slow; later ones vary."""
    slow = [{"step": n + 1, "step_time_s": 5 * seconds} for n in range(3)]
    return slow + [
        {"step": n + 4, "step_time_s": seconds * (1 + 0.05 * (-1) ** n)} for n in range(count)
    ]


def test_one_run_makes_the_next_prediction_right() -> None:
    before = expected_step_time_s(JOB)
    path = append_measurement("local:8", JOB, _steps(4 * before))
    assert path == path_of("local:8") and path.is_file()
    assert expected_step_time_s(JOB) == pytest.approx(4 * before, rel=0.05)
    kept = read_calibration("local:8").runs
    assert len(kept) == 1 and kept[0].step_time_s == pytest.approx(4 * before, rel=0.06)


@pytest.mark.parametrize("factor", [0.1, 0.3, 3.0, 30.0])
def test_any_speed_of_a_machine_is_reached(factor: float) -> None:
    wanted = factor * expected_step_time_s(JOB)
    append_measurement("local:8", JOB, _steps(wanted))
    assert expected_step_time_s(JOB) == pytest.approx(wanted, rel=0.15)


def test_known_constants_are_found_again_for_layouts_not_seen() -> None:
    """Three layouts are measured on a machine whose constants are known, a fourth is predicted."""
    shift = np.array([-1.0, 0.2, -0.5, 0.5, -0.3, 0.4, 0.6])
    truth = replace(SHIPPED, table={**SHIPPED.table, **moved_by(SHIPPED, shift, JOB)})

    def seconds(one: Job, known: Constants) -> float:
        return predict(question_of(one, known), one.layout).step_time_s

    seen = [
        job(dp_replicate=8),
        job(dp_replicate=2, tp=2, pp=2, micro_batch=4),
        job(dp_replicate=4, tp=2),
    ]
    for one in seen:
        append_measurement("local:8", one, [{"step_time_s": seconds(one, truth)}] * 9)
    unseen = job(dp_replicate=2, tp=4)
    found = seconds(unseen, calibrated("local:8"))
    assert found == pytest.approx(seconds(unseen, truth), rel=0.1)
    assert abs(found / seconds(unseen, SHIPPED) - 1) > 0.3


def test_runs_of_one_job_count_by_their_median() -> None:
    usual = expected_step_time_s(JOB)
    for factor in (2.0, 2.0, 20.0):
        append_measurement("local:8", JOB, _steps(factor * usual))
    assert expected_step_time_s(JOB) == pytest.approx(2 * usual, rel=0.06)
    assert len(read_calibration("local:8").runs) == 3


def test_only_the_newest_runs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "KEPT_RUNS", 2)
    for factor in (1.0, 2.0, 3.0):
        append_measurement("local:8", JOB, _steps(factor))
    assert [round(run.step_time_s) for run in read_calibration("local:8").runs] == [2, 3]


def test_short_runs_say_nothing() -> None:
    assert append_measurement("local:8", JOB, _steps(1.0)[:5]) is None
    assert not path_of("local:8").exists()
    assert calibrated("local:8").table == SHIPPED.table


def test_numbers_of_processes_have_files_of_their_own() -> None:
    append_measurement("local:8", JOB, _steps(9.0))
    assert calibrated("local:4").table == SHIPPED.table
    assert path_of("p5:64") == path_of("P5:1024") != path_of("local:8")


def test_what_was_fitted_is_called_measured_with_a_narrow_interval() -> None:
    append_measurement("local:8", JOB, _steps(2.0))
    known = calibrated("local:8")
    one = predict(question_of(JOB, known), JOB.layout)
    assert one.origin == "measured"
    assert one.step_time_high_s / one.step_time_s < SHIPPED.intervals["assumed"][1]


def test_a_broken_file_is_one_clear_line(own_folder: Path) -> None:
    path = path_of("local:8")
    path.parent.mkdir(parents=True)
    for text in ("no toml [", "runs = 3", "[[runs]]\nwrong = 1", ""):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            calibrated("local:8")
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert own_folder in path.parents


def test_every_fitted_constant_is_one_that_a_prediction_uses() -> None:
    for place, name in enumerate(FITTED):
        shift = np.zeros(len(FITTED))
        shift[place] = 1.0
        moved = replace(SHIPPED, table={**SHIPPED.table, **moved_by(SHIPPED, shift, JOB)})
        one = predict(question_of(JOB, moved), JOB.layout).step_time_s
        assert one != pytest.approx(expected_step_time_s(JOB), rel=1e-9), name


def test_nothing_measured_moves_nothing() -> None:
    exact = expected_step_time_s(JOB)
    run = Measured(calibration._kept(JOB), exact, 9, 0.0, "now")
    for name, constant in fit(SHIPPED, [run]).constants.items():
        assert constant.value == pytest.approx(constant.prior, rel=1e-6), name
