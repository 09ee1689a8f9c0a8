"""`meshwright validate`: figures by source and overall, refusals, and the JSON document."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from test_rows import ROW

from meshwright.base.errors import DataError
from meshwright.cli.validate import validate as command
from meshwright.plan.validate.report import validate
from meshwright.plan.validate.time_report import Errors

SHARED = Path(__file__).parents[5] / "shared" / "data" / "published_runs.csv"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    rows = [
        ROW,
        {**ROW, "id": "dgxc-901", "step_time_s": "14.0"},
        {**ROW, "id": "dgxc-902", "notes": "DOUBTFUL"},
        {**ROW, "id": "other-1", "source": "elsewhere", "chip": "?"},
    ]
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for row in rows for name in row}))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_rows_are_used_or_refused(runs: Path) -> None:
    report = validate(runs)
    time = report.overall["step_time"]
    assert (time.used, time.refused) == (2, 2)
    assert time.median_abs_error is not None
    assert time.median_abs_error < 0.2
    assert dict(report.refused_time["dgxc-benchmarking v25.02"]) == {"DOUBTFUL in its notes": 1}
    assert report.sources["elsewhere"]["step_time"].used == 0


def test_the_document_has_the_agreed_keys(runs: Path) -> None:
    document = validate(runs).document()
    assert set(document) == {"overall", "sources", "worst"}
    keys = {"used", "refused", "median_abs_error", "mean_abs_error", "p90_abs_error"}
    for kind in ("step_time", "peak_memory"):
        assert set(document["overall"][kind]) == keys
    assert document["overall"]["peak_memory"]["median_abs_error"] is None
    errors = [abs(row["error"]) for row in document["worst"]]
    assert errors == sorted(errors, reverse=True)


def test_the_command_prints_one_document(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(runs, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["overall"]["step_time"]["used"] == 2


def test_the_command_prints_tables(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(runs) == 0
    out = capsys.readouterr().out
    assert "worst rows" in out
    assert "DOUBTFUL in its notes" in out


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.csv: no such file"):
        command(tmp_path / "absent.csv")


@pytest.mark.skipif(not SHARED.is_file(), reason="published runs are not on this machine")
def test_published_runs_stay_predicted() -> None:
    """What has been reached; better figures may tighten it, none may loosen it unseen."""
    time = validate(SHARED).overall["step_time"]
    assert time.used >= 890
    assert time.median_abs_error is not None
    assert time.p90_abs_error is not None
    assert time.median_abs_error < 0.06
    assert time.p90_abs_error < 0.21


def test_errors_count_by_their_size() -> None:
    found = Errors.of(np.array([-0.5, -0.2, 0.1]), refused=4)
    assert (found.used, found.refused, found.median_abs_error) == (3, 4, 0.2)
    assert found.mean_abs_error == pytest.approx(0.8 / 3)
