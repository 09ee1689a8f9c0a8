"""`meshwright train`: from a job file, or a run to go on with, to a trained model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwright.base.errors import InputError, RunError
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import Commit, latest
from meshwright.cli.corpus import JobData, prepare_job
from meshwright.cli.options import AsJson, Overrides, log_console, print_json
from meshwright.cli.session import (
    IDENTITY_FILE,
    MODEL_FOLDER,
    Session,
    start_engine,
    why_not_exported,
)
from meshwright.cli.start import refuse_bad_start
from meshwright.conduct.conductor import Outcome, Status
from meshwright.conduct.rundir import RunDir, living_agents
from meshwright.conduct.signals import StopSignals
from meshwright.data.rows import check_goes_on, open_rows
from meshwright.plan.job import Job, check_resume, load_job
from meshwright.watch.history import read_run
from meshwright.watch.summary import summary

_RUNS = Path("runs")
_INTERRUPTED = 130


def train(
    target: Annotated[Path, typer.Argument(metavar="JOB.toml|RUN", help="Job file, or a run.")],
    override: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run RUN.")] = False,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of the new run; default runs/NAME-N.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Train the model of a job file, or go on with a run that was stopped."""
    console = log_console()
    if resume and run_dir:
        raise InputError("--run-dir: a resumed run keeps its folder; leave one of the two out")
    with StopSignals() as signals:
        if resume:
            outcome, run = _go_on(target, override, console, signals)
        else:
            outcome, run = _start(target, override, run_dir, console, signals)
    if as_json:
        print_json(summary(read_run(run)))
    return _conclude(run, outcome, console)


def _start(
    job_file: Path,
    override: list[str] | None,
    run_dir: Path | None,
    console: Console,
    signals: StopSignals,
) -> tuple[Outcome, Path]:
    if job_file.is_dir():
        raise InputError(f"{job_file}: a folder; give a job file, or --resume to go on with a run")
    job = load_job(job_file, override)
    if run_dir:
        RunDir.refuse_taken(run_dir)  # before the data, which may take a while
    with start_engine(job) as engine:  # imports torch while the data is prepared
        refuse_bad_start(job)
        data = prepare_job(job, console)
        made = RunDir.create_at(run_dir) if run_dir else RunDir.create(_RUNS, job.job.name)
        with made as rundir:
            session = Session(engine, rundir, job, data, console, signals)
            return session.run(None), rundir.path


def _go_on(
    run: Path, override: list[str] | None, console: Console, signals: StopSignals
) -> tuple[Outcome, Path]:
    with RunDir.open_existing(run) as rundir:
        job = load_job(run / "job.toml", override)
        check_resume(load_job(run / "job.toml"), job)
        if living_agents(run):
            return _adopt(run, rundir, job, override, console, signals), run
        checkpoint = latest(rundir.checkpoints)
        if checkpoint is None:
            raise InputError(f"{run}: has no checkpoint yet; start it anew from its job file")
        done = checkpoint.step >= job.job.steps
        if done and ((run / MODEL_FOLDER).is_dir() or why_not_exported(job)):
            raise InputError(
                f"{run}: has done all of job.steps = {job.job.steps}; "
                f"go further with -o job.steps={2 * job.job.steps}"
            )
        with start_engine(job) as engine:  # only for a run that will be gone on with
            data = prepare_job(job, console)
            _refuse_changed_data(run, data)
            _refuse_other_position(job, data, checkpoint)
            session = Session(engine, rundir, job, data, console, signals)
            return (session.finish() if done else session.run(checkpoint.path)), run


def _adopt(
    run: Path,
    rundir: RunDir,
    job: Job,
    override: list[str] | None,
    console: Console,
    signals: StopSignals,
) -> Outcome:
    """Be the conductor of a run that has lost its own, and trains all the same."""
    if override:
        raise InputError(
            f"-o {override[0]}: the workers of {run} still train, and keep the job they began "
            "with; leave it out, or stop the run first"
        )
    with start_engine(job) as engine:
        data = prepare_job(job, console)
        _refuse_changed_data(run, data)
        return Session(engine, rundir, job, data, console, signals, adopt=True).run(None)


def _refuse_changed_data(run: Path, data: JobData) -> None:
    try:
        begun_with = json.loads((run / IDENTITY_FILE).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{run / IDENTITY_FILE}: cannot be read: {error}") from error
    for key, value in data.identity.items():
        if begun_with.get(key) != value:
            raise InputError(
                f"data.source: {key} was {begun_with.get(key)} when the run began and is {value} "
                "now; restore the corpus, or start a new run"
            )


def _refuse_other_position(job: Job, data: JobData, checkpoint: Commit) -> None:
    """The workers would refuse it too, but only after they have been started."""
    reading = job.data.reading(job.cluster.processes)
    rows = open_rows(data.train_prefix, job.data, job.job.seed, data.end_of_text, reading)
    sample = checkpoint.step * job.data.global_batch
    check_goes_on(rows, Reader(checkpoint.path).meta, sample)


def _conclude(run: Path, outcome: Outcome, console: Console) -> int:
    """Say how it ended; the exit code."""
    if outcome.status is Status.FAILED:
        raise RunError(outcome.error or "the run failed")
    name = shlex.quote(str(run))
    if outcome.status is Status.FINISHED:
        lines = [f"report: {run / 'report.html'}"]
        if (run / MODEL_FOLDER).is_dir():
            lines += [
                f"model:  {run / MODEL_FOLDER}",
                f'try:    meshwright generate {name} --prompt "def "',
            ]
    elif latest(run / "checkpoints") is None:
        lines = [f"stopped at step {outcome.step}, before anything was saved; start it anew"]
    else:
        unsaved = f" ({outcome.error})" if outcome.error else ""
        go_on = f"go on with: meshwright train {name} --resume"
        lines = [f"stopped at step {outcome.step}{unsaved}; {go_on}"]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if outcome.status is Status.FINISHED else _INTERRUPTED
