"""`meshwright data trial`: how much of a job's steps reading costs, measured by going without."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from meshwright.base.errors import RunError
from meshwright.cli.corpus import prepare_job
from meshwright.cli.options import AsJson, Overrides, log_console, print_json
from meshwright.cli.session import WORKER, Session
from meshwright.conduct.conductor import Status
from meshwright.conduct.local import LocalEngine
from meshwright.conduct.rundir import RunDir, read_lines
from meshwright.conduct.signals import StopSignals
from meshwright.data.feed_control import input_bound_share, replays
from meshwright.plan.job import Job, ResilienceSection, load_job

_RUN = 5  # steps of one kind before those of the other, so that both meet the same machine


def trial(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="Job file.")],
    override: Overrides = None,
    steps: Annotated[int, typer.Option(min=5, max=1000, help="Of each kind.")] = 30,
    as_json: AsJson = False,
) -> int:
    """Run some steps as usual and as many on one batch, and say what reading costs."""
    job = load_job(job_file, override)
    found = shares(_run(job, _RUN * (2 * ceil(steps / _RUN) + 1)))
    if as_json:
        print_json(found)
    else:
        typer.echo(
            f"a step takes {found['step_time_s']:.3g} s, {found['replayed_step_time_s']:.3g} s on "
            f"one batch again and again: {found['input_bound_share']:.1%} of it is reading; "
            f"{found['wait_share']:.1%} is waiting for data"
        )
    return 0


def shares(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """From the metrics of a run whose steps replayed a batch in every other `_RUN`, without the
    first one."""
    usual, replayed = (
        [one for one in metrics if one["step"] > _RUN and replays(one["step"] - 1, _RUN) == kind]
        for kind in (False, True)
    )
    usual_s, replayed_s = ([one["step_time_s"] for one in some] for some in (usual, replayed))
    return {
        "steps": len(usual),
        "step_time_s": median(usual_s),
        "replayed_step_time_s": median(replayed_s),
        "input_bound_share": input_bound_share(usual_s, replayed_s),
        "wait_share": sum(one["data_wait_s"] for one in usual) / sum(usual_s),
    }


def _run(job: Job, steps: int) -> list[dict[str, Any]]:
    """The metrics of a run that is thrown away, half of whose steps replay a batch."""
    short = job.job.model_copy(update={"steps": steps, "eval_every": steps})
    rarely = job.checkpoint.model_copy(update={"every": steps})
    sections = {"job": short, "checkpoint": rarely, "resilience": ResilienceSection()}
    job = job.model_copy(update=sections)
    with (
        StopSignals() as signals,
        LocalEngine.start(WORKER) as engine,
        tempfile.TemporaryDirectory() as scratch,
    ):
        console = log_console()
        data = prepare_job(job, console)
        with RunDir.create_at(Path(scratch) / "run") as rundir:
            session = Session(engine, rundir, job, data, console, signals, replay=_RUN)
            outcome = session.run(None)
            if outcome.status is Status.INTERRUPTED:
                raise KeyboardInterrupt
            if outcome.status is not Status.FINISHED:
                raise RunError(outcome.error or "the trial failed")
            return list(read_lines(rundir.metrics))
