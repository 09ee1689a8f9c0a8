"""`meshwright train`: from a job file, or a run to go on with, to a trained model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwright.base.errors import InputError, RunError
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.opening import StoreAt
from meshwright.checkpoint.reader import Reader
from meshwright.cli.commits import as_asked, refuse_bad_store, store_of_run
from meshwright.cli.corpus import JobData, prepare_job
from meshwright.cli.elsewhere import here_again, parse_here, tell_elsewhere
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
from meshwright.conduct.fleet import Fleet
from meshwright.conduct.local import LocalEngine
from meshwright.conduct.rundir import RunDir, living_agents
from meshwright.conduct.signals import StopSignals
from meshwright.conduct.stores import store_of
from meshwright.data.rows import check_goes_on, open_rows
from meshwright.plan.job import Job, check_resume, load_job
from meshwright.watch.history import read_run
from meshwright.watch.summary import summary

EngineOf = Callable[[Job, frozenset[int] | None], LocalEngine | Fleet]

_RUNS = Path("runs")
_INTERRUPTED = 130


def train(
    target: Annotated[Path, typer.Argument(metavar="JOB.toml|RUN", help="Job file, or a run.")],
    override: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run RUN.")] = False,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of the new run; default runs/NAME-N.")
    ] = None,
    nodes_here: Annotated[
        str | None,
        typer.Option(
            "--nodes-here",
            metavar="N,...",
            help="Nodes of this machine, or none; default all. "
            "`meshwright job agent` starts the others.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Train the model of a job file, or go on with a run that was stopped."""
    if resume and run_dir:
        raise InputError("--run-dir: a resumed run keeps its folder; leave one of the two out")
    return train_by(start_engine, target, override, resume, run_dir, nodes_here, as_json)


def train_by(
    engine_of: EngineOf,
    target: Path,
    override: list[str] | None = None,
    resume: bool = False,
    run_dir: Path | None = None,
    nodes_here: str | None = None,
    as_json: bool = False,
) -> int:
    """The same, by what `engine_of` starts the workers with."""
    console = log_console()
    with StopSignals() as signals:
        if resume:
            outcome, run = _go_on(engine_of, target, override, nodes_here, console, signals)
        else:
            outcome, run = _start(
                engine_of, target, override, run_dir, nodes_here, console, signals
            )
    if as_json:
        print_json(summary(read_run(run)))
    return _conclude(run, outcome, console)


def _start(
    engine_of: EngineOf,
    job_file: Path,
    override: list[str] | None,
    run_dir: Path | None,
    nodes_here: str | None,
    console: Console,
    signals: StopSignals,
) -> tuple[Outcome, Path]:
    if job_file.is_dir():
        raise InputError(f"{job_file}: a folder; give a job file, or --resume to go on with a run")
    job = load_job(job_file, override)
    if run_dir:
        RunDir.refuse_taken(run_dir)  # before the data, which may take a while
    here = parse_here(job, nodes_here)
    with engine_of(job, here) as engine:  # imports torch while the data is prepared
        refuse_bad_start(job)
        refuse_bad_store(job)
        data = prepare_job(job, console)
        made = RunDir.create_at(run_dir) if run_dir else RunDir.create(_RUNS, job.job.name)
        with made as rundir:
            tell_elsewhere(rundir.path, job, here, console)
            session = Session(engine, rundir, job, data, console, signals)
            return session.run(None), rundir.path


def _go_on(
    engine_of: EngineOf,
    run: Path,
    override: list[str] | None,
    nodes_here: str | None,
    console: Console,
    signals: StopSignals,
) -> tuple[Outcome, Path]:
    with RunDir.open_existing(run) as rundir:
        job = load_job(run / "job.toml", override)
        check_resume(load_job(run / "job.toml"), job)
        here = here_again(run) if nodes_here is None else parse_here(job, nodes_here)
        if living_agents(run):
            outcome = _adopt(engine_of, run, rundir, job, override, here, console, signals)
            return outcome, run
        at = store_of(job, run)
        with as_asked():
            checkpoint = at.head()
        if checkpoint is None:
            raise _nothing_saved(run, at)
        done = checkpoint.step >= job.job.steps
        if done and ((run / MODEL_FOLDER).is_dir() or why_not_exported(job)):
            raise InputError(
                f"{run}: has done all of job.steps = {job.job.steps}; "
                f"go further with -o job.steps={2 * job.job.steps}"
            )
        with engine_of(job, here) as engine:  # only for a run that will be gone on with
            tell_elsewhere(run, job, here, console)
            data = prepare_job(job, console)
            _refuse_changed_data(run, data)
            _refuse_other_position(job, data, at.open().reader(checkpoint))
            begun = at.open().last(at.branch)
            checkpoint = _newest_good(run, at, console)
            session = Session(engine, rundir, job, data, console, signals, begun=begun)
            done = checkpoint.step >= job.job.steps  # it may be an earlier one
            return (session.finish() if done else session.run(checkpoint)), run


def _nothing_saved(run: Path, at: StoreAt) -> InputError:
    return InputError(
        f"{run}: has no checkpoint on branch {at.branch}; start it anew from its job file, "
        "or the branch by meshwright checkpoint branch"
    )


def _newest_good(run: Path, at: StoreAt, console: Console) -> Commit:
    """What to go on from, read whole; says what is wrong with what is newer."""
    found = at.newest_good()
    lines = [f"{commit} is damaged, and not used: {why}" for commit, why in found.bad]
    if found.repaired:
        lines.append(f"repaired from {at.replica}: {', '.join(found.repaired)}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if found.commit is None:
        raise _nothing_saved(run, at)
    return found.commit


def _adopt(
    engine_of: EngineOf,
    run: Path,
    rundir: RunDir,
    job: Job,
    override: list[str] | None,
    here: frozenset[int] | None,
    console: Console,
    signals: StopSignals,
) -> Outcome:
    """Be the conductor of a run that has lost its own, and trains all the same."""
    if override:
        raise InputError(
            f"-o {override[0]}: the workers of {run} still train, and keep the job they began "
            "with; leave it out, or stop the run first"
        )
    with engine_of(job, here) as engine:
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


def _refuse_other_position(job: Job, data: JobData, checkpoint: Reader) -> None:
    """The workers would refuse it too, but only after they have been started."""
    reading = job.data.reading(job.cluster.processes)
    rows = open_rows(data.train_prefix, job.data, job.job.seed, data.end_of_text, reading)
    sample = checkpoint.step * job.data.global_batch
    check_goes_on(rows, checkpoint.meta, sample)


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
    elif store_of_run(run).head() is None:
        lines = [f"stopped at step {outcome.step}, before anything was saved; start it anew"]
    else:
        unsaved = f" ({outcome.error})" if outcome.error else ""
        go_on = f"go on with: meshwright train {name} --resume"
        lines = [f"stopped at step {outcome.step}{unsaved}; {go_on}"]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if outcome.status is Status.FINISHED else _INTERRUPTED
