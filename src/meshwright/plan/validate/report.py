"""What `meshwright validate` says: step time and peak memory of public runs against predictions."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.plan.cost.constants import Constants
from meshwright.plan.validate.memory_published import memory_run
from meshwright.plan.validate.rows import Refused, Run, read_runs
from meshwright.plan.validate.time_report import (
    Errors,
    TimedRow,
    as_json,
    by_source,
    refusals,
    timed_rows,
)

WORST = 20


@dataclass(frozen=True)
class MemoryRow:
    """One row: measured and predicted peak."""

    id: str
    source: str
    measured_bytes: float
    predicted_bytes: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_bytes / self.measured_bytes - 1.0


@dataclass(frozen=True)
class Report:
    """Everything that `validate` found in one file."""

    timed: tuple[TimedRow, ...]
    remembered: tuple[MemoryRow, ...]
    refused_time: dict[str, Counter[str]]
    refused_memory: dict[str, Counter[str]]

    @property
    def overall(self) -> dict[str, Errors]:
        """Figures over all rows."""
        return {
            "step_time": Errors.of(
                np.array([row.error for row in self.timed]), _total(self.refused_time)
            ),
            "peak_memory": Errors.of(
                np.array([row.error for row in self.remembered]), _total(self.refused_memory)
            ),
        }

    @property
    def sources(self) -> dict[str, dict[str, Errors]]:
        """Figures of each source."""
        time = by_source(self.timed, self.refused_time)
        names = sorted(time.keys() | {row.source for row in self.remembered})
        nothing = Errors.of(np.array([]), 0)
        return {
            name: {
                "step_time": time.get(name, nothing),
                "peak_memory": Errors.of(
                    np.array([row.error for row in self.remembered if row.source == name]),
                    sum(self.refused_memory.get(name, Counter()).values()),
                ),
            }
            for name in names
        }

    def worst(self, count: int = WORST) -> list[TimedRow | MemoryRow]:
        """The rows that are missed by most, of both kinds."""
        every: list[TimedRow | MemoryRow] = [*self.timed, *self.remembered]
        return sorted(every, key=lambda row: -abs(row.error))[:count]

    def document(self) -> dict[str, Any]:
        """The one JSON document of `meshwright validate --json`."""
        return {
            "overall": {name: as_json(errors) for name, errors in self.overall.items()},
            "sources": {
                name: {
                    **{kind: as_json(errors) for kind, errors in kinds.items()},
                    "refused_time": dict(self.refused_time.get(name, Counter())),
                    "refused_memory": dict(self.refused_memory.get(name, Counter())),
                }
                for name, kinds in self.sources.items()
            },
            "worst": [_row(row) for row in self.worst()],
        }


def validate(path: Path, constants: Constants | None = None) -> Report:
    """Predict every run of `path` again. Raises DataError where it has no runs."""
    rows = read_runs(path)
    runs = [row for row in rows if isinstance(row, Run)]
    remembered, refused = _memory(path, rows)
    return Report(
        timed=tuple(timed_rows(runs, constants or Constants.shipped())),
        remembered=tuple(remembered),
        refused_time=refusals(rows),
        refused_memory=refused,
    )


def _memory(
    path: Path, rows: Sequence[Run | Refused]
) -> tuple[list[MemoryRow], dict[str, Counter[str]]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        cells = list(csv.DictReader(file))
    found: list[MemoryRow] = []
    refused: dict[str, Counter[str]] = {}
    for row, raw in zip(rows, cells, strict=True):
        if not (raw.get("peak_mem_gb_per_chip") or "").strip():
            continue
        try:
            if isinstance(row, Refused):
                raise ValueError(row.reason)
            run = memory_run(row, raw)
            found.append(MemoryRow(run.id, run.origin, run.peak_bytes, run.predicted_bytes()))
        except ValueError as reason:
            refused.setdefault(row.origin, Counter())[str(reason)] += 1
    return found, refused


def _row(row: TimedRow | MemoryRow) -> dict[str, Any]:
    if isinstance(row, TimedRow):
        figures = {"measured_s": row.measured_s, "predicted_s": row.predicted_s}
        more: dict[str, Any] = {"what": "step_time", "assumed": list(row.assumed), **figures}
    else:
        more = {
            "what": "peak_memory",
            "measured_bytes": row.measured_bytes,
            "predicted_bytes": row.predicted_bytes,
        }
    return {"id": row.id, "source": row.source, "error": row.error, **more}


def _total(refused: dict[str, Counter[str]]) -> int:
    return sum(sum(reasons.values()) for reasons in refused.values())
