"""Peak memory of all public runs against the prediction: figures by source, and the worst rows."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.plan.cost.framework import framework
from meshwright.plan.validate.memory_fit import LARGE_BYTES, Measured, cross_validate
from meshwright.plan.validate.memory_golden import GoldenRefused, GoldenRun, read_golden
from meshwright.plan.validate.memory_published import MemoryRun, memory_run
from meshwright.plan.validate.rows import Refused, read_runs

GOLDEN = "Megatron-LM CI"
WORST = 5


@dataclass(frozen=True)
class Scored:
    """A row: measured and predicted bytes; `error` is relative, with constants whose fit has not
    seen the row's case where `unseen`, else of a framework that nothing was fitted for."""

    name: str
    origin: str
    framework: str
    measured_bytes: float
    error: float
    unseen: bool


@dataclass(frozen=True)
class SourceScore:
    """Figures of one source; errors are relative and absolute ones."""

    origin: str
    used: int
    refused: dict[str, int]
    median: float
    mean: float
    p90: float
    worst: tuple[Scored, ...]


def score(published: Path, golden: Path | None) -> list[SourceScore]:
    """Figures for every source with a peak in `published`, and for the CI runs in `golden`: those
    above 8 GiB, and all."""
    with published.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    runs, refused = _published(published, rows)
    large: list[GoldenRun] = []
    small: list[GoldenRun] = []
    if golden is not None:
        found = read_golden(golden, framework("megatron"), rows)
        for one in found:
            if isinstance(one, GoldenRefused):
                heading = _ci(one.peak_bytes)
                refused.setdefault(heading, Counter())[one.reason] += 1
            else:
                (large if one.peak_bytes > LARGE_BYTES else small).append(one)
    scored = [*_scores([*large, *runs]), *_seen(small)]
    origins = sorted({one.origin for one in scored} | refused.keys())
    return [_summary(name, scored, refused.get(name, Counter())) for name in origins]


def _ci(peak_bytes: float) -> str:
    return f"{GOLDEN}, {'above' if peak_bytes > LARGE_BYTES else 'up to'} 8 GiB"


def _published(
    path: Path, rows: Sequence[dict[str, str]]
) -> tuple[list[MemoryRun], dict[str, Counter[str]]]:
    by_id = {row["id"]: row for row in rows}
    used: list[MemoryRun] = []
    refused: dict[str, Counter[str]] = {}
    for run in read_runs(path):
        row = by_id[run.id]
        if not row.get("peak_mem_gb_per_chip"):
            continue
        try:
            if isinstance(run, Refused):
                raise ValueError(run.reason)
            used.append(memory_run(run, row))
        except ValueError as reason:
            refused.setdefault(run.origin, Counter())[str(reason)] += 1
    return used, refused


def _scores(runs: Sequence[GoldenRun | MemoryRun]) -> Iterator[Scored]:
    """Every run with constants that have not seen it, framework by framework."""
    for name in sorted({_framework(run) for run in runs}):
        mine = [run for run in runs if _framework(run) == name]
        fitted = cross_validate(name, mine)
        for run, error in zip(mine, fitted.unseen, strict=True):
            yield _scored(run, name, float(error), bool(fitted.values))


def _seen(runs: Sequence[GoldenRun]) -> Iterator[Scored]:
    """Small runs with the stored constants: they take no part in any fit."""
    for run in runs:
        yield _scored(run, "megatron", run.predicted_bytes() / run.peak_bytes - 1.0, True)


def _framework(run: GoldenRun | MemoryRun) -> str:
    return run.setting.framework.name


def _scored(run: Measured, name: str, error: float, unseen: bool) -> Scored:
    golden = isinstance(run, GoldenRun)
    label = f"{run.case} {run.hardware}" if isinstance(run, GoldenRun) else getattr(run, "id", "")
    origin = _ci(run.peak_bytes) if golden else getattr(run, "origin", "")
    return Scored(label, origin, name, run.peak_bytes, error, unseen)


def _summary(origin: str, scored: Sequence[Scored], refused: Counter[str]) -> SourceScore:
    mine = sorted((one for one in scored if one.origin == origin), key=lambda x: -abs(x.error))
    errors = np.abs([one.error for one in mine]) if mine else np.array([np.nan])
    return SourceScore(
        origin=origin,
        used=len(mine),
        refused=dict(refused),
        median=float(np.median(errors)),
        mean=float(np.mean(errors)),
        p90=float(np.quantile(errors, 0.9)),
        worst=tuple(mine[:WORST]),
    )
