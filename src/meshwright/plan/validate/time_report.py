"""How far predicted step times are from measured ones: by source, and the worst rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.cost.constants import Constants
from meshwright.plan.validate.rows import Refused, Run
from meshwright.plan.validate.time_model import Columns

Floats = NDArray[np.float64]
UNTIMED = "no step time or tokens/s"


@dataclass(frozen=True)
class Errors:
    """Rows used and refused, and the absolute relative errors of those used (None without any)."""

    used: int
    refused: int
    median_abs_error: float | None
    mean_abs_error: float | None
    p90_abs_error: float | None

    @classmethod
    def of(cls, errors: Floats, refused: int) -> Errors:
        """From signed relative errors."""
        if not len(errors):
            return cls(0, refused, None, None, None)
        size = np.abs(errors)
        spread = (float(np.median(size)), float(size.mean()), float(np.quantile(size, 0.9)))
        return cls(len(errors), refused, *spread)


@dataclass(frozen=True)
class TimedRow:
    """One row: measured and predicted seconds, and what was filled in where the row is silent."""

    id: str
    source: str
    measured_s: float
    predicted_s: float
    assumed: tuple[str, ...]

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_s / self.measured_s - 1.0


def timed_rows(runs: Sequence[Run], constants: Constants) -> list[TimedRow]:
    """Every run that has a step time, predicted."""
    if not any(run.step_s for run in runs):
        return []
    columns = Columns.of(runs)
    predicted = columns.predict(constants.values, constants.like)["step"]
    return [
        TimedRow(run.id, run.origin, float(measured), float(found), run.assumed)
        for run, measured, found in zip(columns.runs, columns.measured_s, predicted, strict=True)
    ]


def refusals(rows: Sequence[Run | Refused]) -> dict[str, Counter[str]]:
    """For each source how many rows were refused for each reason; a row without a time is one."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        if isinstance(row, Run) and row.step_s:
            continue
        reason = row.reason if isinstance(row, Refused) else row.source.untimed or UNTIMED
        found.setdefault(row.origin, Counter())[reason] += 1
    return found


def by_source(timed: Sequence[TimedRow], refused: Mapping[str, Counter[str]]) -> dict[str, Errors]:
    """Figures of every source, in alphabetical order."""
    names = sorted({row.source for row in timed} | refused.keys())
    return {
        name: Errors.of(
            np.array([row.error for row in timed if row.source == name]),
            sum(refused.get(name, Counter()).values()),
        )
        for name in names
    }


def as_json(errors: Errors) -> dict[str, Any]:
    """As the document of `meshwright validate --json` has it."""
    return asdict(errors)
