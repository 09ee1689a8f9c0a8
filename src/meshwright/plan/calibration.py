"""What was measured on a cluster, kept in the user's folder, and constants that follow from it.

The file of a cluster is TOML: `[[runs]]`, one for each measured run, and under `[constants]` what
is fitted to all of them whenever one is added: few numbers, each with a prior, so that one run
already moves them and no run decides alone.
"""

from __future__ import annotations

import math
import os
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.base.config import to_toml
from meshwright.base.errors import ConfigError
from meshwright.plan.auto import question_of
from meshwright.plan.cost.candidates import Candidates, Floats
from meshwright.plan.cost.constants import Constant, Constants
from meshwright.plan.cost.step import step_time
from meshwright.plan.job import Job, resolve_job

KEPT_RUNS = 50  # the newest that are kept and fitted
WARM_UP = 3  # steps of a run that are not counted: caches fill, kernels are compiled
FEWEST_STEPS = 3

# What a calibration fits, and how far the logarithm of each may move from what is shipped. The
# nameplate of a process of this machine is a guess, so speed and starts may move by factors.
FITTED = {
    "product": 1.5,
    "attention": 1.5,
    "memory": 1.5,
    "host_layer_s": 1.5,
    "link": 1.0,
    "latency": 1.0,
    "step_s": 1.0,
}
NOISE = 0.03  # of the logarithm of a measured step time
RUN_TO_RUN = 0.08  # of the same from run to run, where others use the machine: assumed
ROUNDS, LONGEST = 15, 1.0  # of Gauss-Newton, and its longest step


@dataclass(frozen=True)
class Measured:
    """One run: its job (tables of a job file), median seconds of a step and of how many, the peak
    that its first worker measured (0: unknown), when."""

    job: Mapping[str, Any]
    step_time_s: float
    steps: int
    peak_flops_per_chip: float
    at: str


@dataclass(frozen=True)
class Calibration:
    """What the file of a cluster holds."""

    runs: tuple[Measured, ...] = ()
    constants: Mapping[str, Constant] = field(default_factory=dict)
    interval: tuple[float, float] | None = None


def folder() -> Path:
    """Where calibrations are kept: MESHWRIGHT_CONFIG, or the user's configuration folder."""
    default = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "meshwright"
    return Path(os.environ.get("MESHWRIGHT_CONFIG") or default) / "calibration"


def path_of(cluster_ref: str) -> Path:
    """The file of a cluster. Processes of one machine share its cores, so each number of them has
    its own; elsewhere a chip is the same however many there are."""
    name, _, chips = cluster_ref.partition(":")
    return folder() / (f"local-{chips}.toml" if name == "local" else f"{name.lower()}.toml")


def read_calibration(cluster_ref: str) -> Calibration:
    """What has been measured, the oldest first; empty where nothing was. Raises ConfigError for a
    file that cannot be read."""
    path = path_of(cluster_ref)
    if not path.is_file():
        return Calibration()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        low, high = tables["interval"]
        return Calibration(
            tuple(Measured(**run) for run in tables["runs"]),
            {name: Constant(**entry) for name, entry in tables["constants"].items()},
            (float(low), float(high)),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        fix = f"cannot be read: {error!r}; mend or delete it"
        raise ConfigError("calibration", str(path), fix) from error


def append_measurement(
    cluster_ref: str,
    job: Job,
    metrics: Sequence[Mapping[str, Any]],
    peak_flops_per_chip: float = 0.0,
) -> Path | None:
    """Keep what a run measured. `metrics` are lines of its metrics.jsonl: `step_time_s` counts.

    None, and nothing is written, where too few steps were made to say anything.
    """
    times = [float(line["step_time_s"]) for line in metrics if line.get("step_time_s")]
    counted = times[WARM_UP:]
    if len(counted) < FEWEST_STEPS:
        return None
    new = Measured(
        job=_kept(job),
        step_time_s=statistics.median(counted),
        steps=len(counted),
        peak_flops_per_chip=peak_flops_per_chip,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    path = path_of(cluster_ref)
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = (*read_calibration(cluster_ref).runs, new)[-KEPT_RUNS:]
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(_toml(fit(Constants.shipped(), runs)), encoding="utf-8")
    draft.replace(path)
    return path


def _kept(job: Job) -> dict[str, Any]:
    """The sections that a step's time depends on, as TOML holds them: without what is None."""
    whole = job.model_dump(mode="json", exclude_none=True)
    return {key: whole[key] for key in ("job", "model", "data", "layout", "cluster")}


def calibrated(cluster_ref: str, shipped: Constants | None = None) -> Constants:
    """The shipped constants, with those that were fitted on the cluster in place of them; unchanged
    where nothing was measured. The interval is as wide as what the fit misses."""
    constants = shipped or Constants.shipped()
    known = read_calibration(cluster_ref)
    if known.interval is None:
        return constants
    kinds = dict.fromkeys(("dense", "moe"), known.interval)
    return replace(
        constants,
        table={**constants.table, **known.constants},
        intervals={**constants.intervals, **kinds},
    )


def fit(shipped: Constants, runs: Sequence[Measured]) -> Calibration:
    """The most likely constants: least squares of log measured over predicted, each constant held
    to what is shipped (`FITTED`). Runs of the same job count as one, with their median."""
    alike: dict[str, list[Measured]] = {}
    for run in runs:
        alike.setdefault(repr({**run.job, "job": None}), []).append(run)
    jobs = [resolve_job(dict(group[-1].job)) for group in alike.values()]
    measured = np.log(
        [statistics.median(run.step_time_s for run in group) for group in alike.values()]
    )

    columns = [(question_of(job), Candidates.from_layouts([job.layout])) for job in jobs]

    def predicted(shift: Floats) -> Floats:
        moved = replace(shipped, table={**shipped.table, **moved_by(shipped, shift, jobs[0])})
        times = [step_time(q.work, q.cluster, c, moved).step_s[0] for q, c in columns]
        return np.log(times)

    moves = _least_squares(predicted, measured)
    missed = math.sqrt(float(np.mean((measured - predicted(moves)) ** 2)))
    width = math.exp(1.2816 * math.hypot(RUN_TO_RUN, missed))
    return Calibration(tuple(runs), moved_by(shipped, moves, jobs[0]), (1 / width, width))


def _least_squares(predicted: Callable[[Floats], Floats], measured: Floats) -> Floats:
    """Moves of the constants, by Gauss-Newton with numerical derivatives; a step is at most
    `LONGEST` and is halved until it helps."""
    spreads, nudges = np.array(list(FITTED.values())), 0.01 * np.eye(len(FITTED))
    moves = np.zeros(len(FITTED))

    def badness(off: Floats, at: Floats) -> float:
        return float(np.sum((off / NOISE) ** 2) + np.sum((at / spreads) ** 2))

    here = predicted(moves)
    for _ in range(ROUNDS):
        slopes = np.column_stack([(predicted(moves + nudge) - here) / 0.01 for nudge in nudges])
        system = slopes.T @ slopes / NOISE**2 + np.diag(1 / spreads**2)
        pull = slopes.T @ (measured - here) / NOISE**2 - moves / spreads**2
        step = np.linalg.solve(system, pull)
        step = step * min(1.0, LONGEST / max(float(np.max(np.abs(step))), 1e-12))
        before = badness(measured - here, moves)
        there = predicted(moves + step)
        while badness(measured - there, moves + step) > before and np.max(np.abs(step)) > 1e-6:
            step = step / 2
            there = predicted(moves + step)
        moves, here = moves + step, there
        if before - badness(measured - here, moves) < 1e-2 * before + 1e-9:
            break
    return moves


def moved_by(shipped: Constants, shift: Floats, job: Job) -> dict[str, Constant]:
    """The constants of this job's chip and style, scaled by exp(shift)."""
    question = question_of(job)
    chip, software = question.cluster.chip.name, shipped.software(question.framework)
    attention = f"attention.{software.attention}"
    keys = {
        "product": (f"product.{chip}", "product.any"),
        "attention": (f"{attention}.{chip}", f"{attention}.any"),
        "link": (f"link.{chip}", "link.any"),
        "host_layer_s": (f"host_layer_s.{software.style}", "host_layer_s.any"),
        "step_s": (f"step_s.{software.style}", "step_s.any"),
    }
    found = {}
    for (name, spread), move in zip(FITTED.items(), shift, strict=True):
        key, otherwise = keys.get(name, (name, name))
        like = shipped.table.get(key) or shipped.table[otherwise]
        value = like.value * math.exp(move)
        found[key] = Constant(value, like.value, spread, NOISE, "measured")
    return found


def _toml(known: Calibration) -> str:
    """A calibration as TOML."""
    lines = ["# Written by `meshwright calibrate` and `meshwright train`."]
    lines += to_toml({"x": {"interval": known.interval}}).splitlines()[1:]
    for name, constant in known.constants.items():
        lines += [f'[constants."{name}"]', *to_toml({"x": asdict(constant)}).splitlines()[1:]]
    for run in known.runs:
        plain = {key: value for key, value in asdict(run).items() if key != "job"}
        lines += ["", "[[runs]]", *to_toml({"x": plain}).splitlines()[1:]]
        for section, table in run.job.items():
            lines += [f"[runs.job.{section}]", *to_toml({"x": table}).splitlines()[1:]]
    return "\n".join(lines) + "\n"
