"""One incarnation of a run: from prepared data to report and exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol
from uuid import uuid4

from rich.console import Console

from meshwright.base.code import code_version
from meshwright.base.config import to_toml
from meshwright.base.errors import ConfigError, RunError
from meshwright.base.events import Kind
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.opening import StoreAt
from meshwright.cli.corpus import JobData
from meshwright.cli.exporting import export_model
from meshwright.cli.kept import Kept
from meshwright.cli.start import first_weights
from meshwright.conduct import conductor, surviving
from meshwright.conduct.conductor import Outcome, Status
from meshwright.conduct.fleet import Fleet
from meshwright.conduct.local import LocalEngine
from meshwright.conduct.muster import Muster
from meshwright.conduct.rundir import RunDir, read_lines
from meshwright.conduct.signals import StopSignals
from meshwright.conduct.stores import store_of
from meshwright.models.hf_config import check_exportable
from meshwright.plan.calibration import append_measurement
from meshwright.plan.describe import describe_plan
from meshwright.plan.job import Job
from meshwright.watch.live import LiveView
from meshwright.watch.redundancy import redundancy, redundancy_words
from meshwright.watch.report import write_report

WORKER = "meshwright.train.worker"
MODEL_FOLDER = "model"
IDENTITY_FILE = "data.json"
_ATTEMPT_FILE = "attempt"


class Harm(Protocol):
    """What a drill does to a run: `armed` are faults that members do to themselves (see
    `train.faults.Fault`); the rest is done at some message of the run."""

    @property
    def armed(self) -> list[dict[str, Any]]: ...

    def on_event(self, fleet: Fleet, message: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Session:
    """What a run needs to go; `run` takes it to its end."""

    engine: LocalEngine | Fleet
    rundir: RunDir
    job: Job
    data: JobData
    console: Console
    signals: StopSignals  # entered
    adopt: bool = False  # the agents of an earlier conductor still train
    harm: Harm | None = None  # what a drill does to the run
    replay: int | None = None  # for a trial (see `train.feeding.StepFeed`)
    begun: int | None = None  # the last record of its branch, when that was looked at

    @cached_property
    def at(self) -> StoreAt:
        """Where its commits are."""
        return store_of(self.job, self.rundir.path)

    @cached_property
    def kept(self) -> Kept:
        """By what its state is kept."""
        return Kept.of(self.job)

    def run(self, checkpoint: Commit | None) -> Outcome:
        """Train to the end, from `checkpoint` if there is one; then write model and report."""
        plan = {**describe_plan(self.job), "redundancy": self.kept.document()}
        if line := self.kept.line():
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        start = None
        if not self.adopt:
            start = self.at.where(checkpoint) if checkpoint else first_weights(self.job, self.at)
        self.signals.only_count()
        self._write_inputs(plan)
        self.at.begin()
        if reason := why_not_exported(self.job):
            note = f"no model folder will be written: {reason}"
            self.console.print(note, markup=False, highlight=False, soft_wrap=True)
        first = 0 if checkpoint is None else checkpoint.step
        outcome = self._train(plan, checkpoint, start)
        self._remember_speed(plan, first)
        if found := redundancy(list(read_lines(self.rundir.path / "events.jsonl"))):
            line = f"redundancy: {redundancy_words(found)}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        if outcome.status is Status.FINISHED:
            self.export()
        self._report()
        return outcome

    def export(self) -> None:
        """Write the last checkpoint as a Hugging Face model, if that can be one."""
        if why_not_exported(self.job):
            return
        saved = self.at.head()
        if saved is None:
            raise RunError(f"{self.at.address}: the run left no checkpoint to export")
        reader = self.at.open().reader(saved)
        folder = export_model(self.job, self.data, reader, self.rundir.path / MODEL_FOLDER)
        self.rundir.append_event({"kind": Kind.MODEL_EXPORTED, "path": str(folder)})

    def finish(self) -> Outcome:
        """For a run that was stopped after its last step: write what it still owes."""
        self.signals.only_count()
        if (last := self.at.head()) is not None:  # its ranks may have ended while nobody listened
            for line in self._said(last):
                self.rundir.restore(line)
        self.export()
        self._report()
        return Outcome(Status.FINISHED, self.job.job.steps, 0.0, None)

    def _train(self, plan: dict[str, Any], checkpoint: Commit | None, start: str | None) -> Outcome:
        started = {"layout": self.job.layout.label, **self._begin(checkpoint)}
        if self.kept.chosen is not None:
            started["redundancy"] = self.kept.chosen.document()
        with LiveView(self.job, plan, self.console) as view:

            def on_event(message: Mapping[str, Any]) -> None:
                self._learn_peak(plan, message)
                view.on_event(message)
                if self.harm is not None and isinstance(self.engine, Fleet):
                    self.harm.on_event(self.engine, message)

            entry, args = f"{WORKER}:main", self._args(plan, start)
            stops = self.signals.count
            if isinstance(self.engine, Fleet):
                return surviving.run(
                    self.engine,
                    self.rundir,
                    Muster(self.kept.job(self.job)),
                    entry,
                    args,
                    on_event,
                    stops,
                    started=started,
                    adopt=self.adopt,
                )
            world = self.job.layout.world
            return conductor.run(
                self.engine, self.rundir, entry, world, args, on_event, stops, started=started
            )

    def _begin(self, checkpoint: Commit | None) -> dict[str, Any]:
        """Make the files of the run agree with where it goes on from; that, for its first event."""
        if self.adopt:
            return {"resumed_from": self.rundir.last_step() or None, "adopted": True}
        resumed_from = None
        if checkpoint is not None:
            resumed_from = checkpoint.step
            for line in self._said(checkpoint):
                self.rundir.restore(line)
        self.rundir.drop_metrics_after(resumed_from or 0)
        return {"resumed_from": resumed_from}

    def _write_inputs(self, plan: dict[str, Any]) -> None:
        self.rundir.write_text("job.toml", to_toml(self.job.model_dump()))
        self.rundir.write_text(IDENTITY_FILE, json.dumps(self.data.identity, indent=2))
        self._write_plan(plan)

    def _write_plan(self, plan: dict[str, Any]) -> None:
        self.rundir.write_text("plan.json", json.dumps(plan, indent=2))

    def _learn_peak(self, plan: dict[str, Any], message: Mapping[str, Any]) -> None:
        """The chip's peak is measured by the first worker; the plan keeps it."""
        if message["kind"] == Kind.RANK_READY and message.get("peak_flops_per_chip"):
            plan["peak_flops_per_chip"] = message["peak_flops_per_chip"]
            self._write_plan(plan)

    def _remember_speed(self, plan: dict[str, Any], first: int) -> None:
        """What this incarnation measured makes later predictions for its cluster better."""
        metrics = [line for line in read_lines(self.rundir.metrics) if line["step"] > first]
        peak = plan["peak_flops_per_chip"] or 0.0
        try:
            append_measurement(self.job.cluster.ref, self.job, metrics, peak)
        except (OSError, ConfigError) as error:  # the run is worth more than the figure
            self.console.print(f"speed not kept: {error}", markup=False, soft_wrap=True)

    def _said(self, checkpoint: Commit) -> list[Sequence[Any]]:
        """What the ranks had said, as the commits up to `checkpoint` keep it: a change has its own
        step's, the whole ones those before."""
        store = self.at.open()
        line = store.commits(self.at.branch)
        upto = [one for one in line if one.step <= checkpoint.step]
        chain = upto[-1 - checkpoint.depth :]
        return [store.reader(one).meta.get("said", ()) for one in chain]

    def _args(self, plan: dict[str, Any], start: str | None) -> dict[str, Any]:
        return {
            "job": self.kept.job(self.job).model_dump(mode="json"),
            "train_prefix": [str(prefix) for prefix in self.data.train_prefix],
            "end_of_text": self.data.end_of_text,
            "held_out_prefix": [p and str(p) for p in self.data.held_out_prefix],
            "checkpoints": asdict(self.at),
            "made_with": {"code": code_version(), "data_identity": self.data.identity},
            **self._incarnation(),
            "resume_from": start,
            "baselines": self.data.baselines,
            "predicted_step_time_s": plan["prediction"]["step_time_s"],
            "replay": self.replay,
            "plan": {key: value for key, value in plan.items() if key != "ranks"},
            **({} if self.harm is None else {"faults": self.harm.armed}),
        }

    def _incarnation(self) -> dict[str, Any]:
        """By what the ranks name the parts of what they save, of this incarnation alone, and where
        the branch stood when it began; the same for a conductor that takes it over."""
        if not self.adopt:
            begun = self.at.open().last(self.at.branch) if self.begun is None else self.begun
            words = {"attempt": uuid4().hex[:12], "begun": begun}
            self.rundir.write_text(_ATTEMPT_FILE, json.dumps(words))
        found: dict[str, Any] = json.loads((self.rundir.path / _ATTEMPT_FILE).read_text())
        return found

    def _report(self) -> None:
        """A report that cannot be written must not hide how the run ended."""
        try:
            write_report(self.rundir.path)
        except OSError as error:
            self.console.print(f"no report: {error}", markup=False, soft_wrap=True)


def start_engine(job: Job, here: frozenset[int] | None = None) -> LocalEngine | Fleet:
    """What starts the workers of `job`, on the nodes `here` (None: all); it imports torch while the
    caller goes on."""
    return Fleet.start(WORKER, here) if job.resilience.survives else LocalEngine.start(WORKER)


def why_not_exported(job: Job) -> str | None:
    """One line if no class of transformers computes the model of `job`, else None."""
    try:
        check_exportable(job.model)
    except ConfigError as error:
        return str(error)
    return None
