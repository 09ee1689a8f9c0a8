"""`meshwright train`: from a job file, or a run to go on with, to a trained model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from meshwright.base.config import to_toml
from meshwright.base.errors import InputError, RunError
from meshwright.base.events import Kind
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import latest
from meshwright.cli.corpus import JobData, prepare_job
from meshwright.cli.options import AsJson, Overrides, log_console, print_json
from meshwright.conduct import conductor
from meshwright.conduct.conductor import Outcome, Status
from meshwright.conduct.local import LocalEngine
from meshwright.conduct.rundir import RunDir
from meshwright.conduct.signals import StopSignals
from meshwright.plan.describe import describe_plan
from meshwright.plan.job import Job, check_resume, load_job
from meshwright.watch.history import read_run
from meshwright.watch.live import LiveView
from meshwright.watch.report import write_report
from meshwright.watch.summary import summary

WORKER = "meshwright.train.worker"
_RUNS = Path("runs")
_IDENTITY = "data.json"
MODEL_FOLDER = "model"


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
    if resume and run_dir:
        raise InputError("--run-dir: a resumed run keeps its folder; leave one of the two out")
    if target.is_dir() and not resume:
        raise InputError(f"{target}: a folder; give a job file, or --resume to go on with a run")
    console = log_console()
    job = load_job(target / "job.toml" if resume else target, override)
    with LocalEngine.start(WORKER) as engine:  # imports torch while the data is prepared
        if resume:
            with RunDir.open_existing(target) as rundir:
                checkpoint = _resume_point(rundir, job)
                data = prepare_job(job, console)
                _refuse_changed_data(rundir, data)
                outcome = _Session(engine, rundir, job, data, console).run(checkpoint)
        else:
            data = prepare_job(job, console)
            made = RunDir.create_at(run_dir) if run_dir else RunDir.create(_RUNS, job.job.name)
            with made as rundir:
                outcome = _Session(engine, rundir, job, data, console).run(None)
    return _conclude(rundir.path, outcome, as_json, console)


def _resume_point(rundir: RunDir, job: Job) -> Path:
    check_resume(load_job(rundir.path / "job.toml"), job)
    found = latest(rundir.checkpoints)
    if found is None:
        raise InputError(f"{rundir.path}: has no checkpoint yet; start it anew from its job file")
    if found.step >= job.job.steps:
        raise InputError(
            f"{rundir.path}: has done all of job.steps = {job.job.steps}; "
            f"go further with -o job.steps={2 * job.job.steps}"
        )
    return found.path


def _refuse_changed_data(rundir: RunDir, data: JobData) -> None:
    try:
        begun_with = json.loads((rundir.path / _IDENTITY).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{rundir.path / _IDENTITY}: cannot be read: {error}") from error
    for key, value in data.identity.items():
        if begun_with.get(key) != value:
            raise InputError(
                f"data.source: {key} was {begun_with.get(key)} when the run began and is {value} "
                "now; restore the corpus, or start a new run"
            )


@dataclass(frozen=True)
class _Session:
    """One incarnation of a run."""

    engine: LocalEngine
    rundir: RunDir
    job: Job
    data: JobData
    console: Console

    def run(self, checkpoint: Path | None) -> Outcome:
        """Train to the end, from `checkpoint` if there is one; then write model and report."""
        plan = describe_plan(self.job)
        resumed_from = None if checkpoint is None else Reader(checkpoint).step
        self._write_inputs(plan)
        self.rundir.drop_metrics_after(resumed_from or 0)
        with StopSignals() as signals, LiveView(self.job, plan, self.console) as view:

            def on_event(message: dict[str, Any]) -> None:
                self._learn_peak(plan, message)
                view.on_event(message)

            outcome = conductor.run(
                self.engine,
                self.rundir,
                f"{WORKER}:main",
                self.job.layout.world,
                self._args(checkpoint),
                on_event,
                signals.count,
                started={"layout": self.job.layout.label, "resumed_from": resumed_from},
            )
        if outcome.status is Status.FINISHED:
            self._export()
        write_report(self.rundir.path)
        return outcome

    def _write_inputs(self, plan: dict[str, Any]) -> None:
        self.rundir.write_text("job.toml", to_toml(self.job.model_dump()))
        self.rundir.write_text(_IDENTITY, json.dumps(self.data.identity, indent=2))
        self._write_plan(plan)

    def _write_plan(self, plan: dict[str, Any]) -> None:
        self.rundir.write_text("plan.json", json.dumps(plan, indent=2))

    def _learn_peak(self, plan: dict[str, Any], message: dict[str, Any]) -> None:
        """The chip's peak is measured by the first worker; the plan keeps it."""
        if message["kind"] == Kind.RANK_READY and message.get("peak_flops_per_chip"):
            plan["peak_flops_per_chip"] = message["peak_flops_per_chip"]
            self._write_plan(plan)

    def _args(self, checkpoint: Path | None) -> dict[str, Any]:
        return {
            "job": self.job.model_dump(mode="json"),
            "train_prefix": str(self.data.prepared.train_prefix),
            "held_out_prefix": str(self.data.prepared.held_out_prefix),
            "checkpoints": str(self.rundir.checkpoints.resolve()),
            "resume_from": None if checkpoint is None else str(checkpoint.resolve()),
            "baselines": self.data.baselines,
        }

    def _export(self) -> None:
        """Write the last checkpoint as a Hugging Face model."""
        # Imported here: only a finished run needs the exporter.
        from meshwright.ship.hf import export_hf

        saved = latest(self.rundir.checkpoints)
        if saved is None:
            raise RunError(f"{self.rundir.checkpoints}: the run left no checkpoint to export")
        reader, prepared = Reader(saved.path), self.data.prepared
        folder = export_hf(
            self.job.model,
            lambda name: reader.read(f"param/{name}"),
            prepared.tokenizer_path,
            prepared.end_of_text,
            self.rundir.path / MODEL_FOLDER,
        )
        self.rundir.append_event({"kind": Kind.MODEL_EXPORTED, "path": str(folder)})


def _conclude(run: Path, outcome: Outcome, as_json: bool, console: Console) -> int:
    """Say how it ended; the exit code."""
    if as_json:
        print_json(summary(read_run(run)))
    if outcome.status is Status.FAILED:
        raise RunError(outcome.error or "the run failed")
    if outcome.status is Status.INTERRUPTED:
        unsaved = f" ({outcome.error})" if outcome.error else ""
        console.print(
            f"stopped at step {outcome.step}{unsaved}; go on with: meshwright train {run} --resume",
            soft_wrap=True,
        )
        return 130
    console.print(f"report: {run / 'report.html'}", soft_wrap=True)
    console.print(f"model:  {run / MODEL_FOLDER}", soft_wrap=True)
    console.print(f'try:    meshwright generate {run} --prompt "def "', soft_wrap=True)
    return 0
