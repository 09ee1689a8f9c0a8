"""One incarnation of a run: from prepared data to report and exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright.base.config import to_toml
from meshwright.base.errors import ConfigError, RunError
from meshwright.base.events import Kind
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import latest
from meshwright.cli.corpus import JobData
from meshwright.cli.start import first_weights
from meshwright.conduct import conductor
from meshwright.conduct.conductor import Outcome, Status
from meshwright.conduct.local import LocalEngine
from meshwright.conduct.rundir import RunDir
from meshwright.conduct.signals import StopSignals
from meshwright.models.hf_config import check_exportable
from meshwright.plan.describe import describe_plan
from meshwright.plan.job import Job
from meshwright.watch.live import LiveView
from meshwright.watch.report import write_report

WORKER = "meshwright.train.worker"
MODEL_FOLDER = "model"
IDENTITY_FILE = "data.json"


@dataclass(frozen=True)
class Session:
    """What a run needs to go; `run` takes it to its end."""

    engine: LocalEngine
    rundir: RunDir
    job: Job
    data: JobData
    console: Console
    signals: StopSignals  # entered

    def run(self, checkpoint: Path | None) -> Outcome:
        """Train to the end, from `checkpoint` if there is one; then write model and report."""
        plan = describe_plan(self.job)
        start = checkpoint or first_weights(self.job, self.rundir.checkpoints)
        self.signals.only_count()
        self._write_inputs(plan)
        if reason := why_not_exported(self.job):
            note = f"no model folder will be written: {reason}"
            self.console.print(note, markup=False, highlight=False, soft_wrap=True)
        outcome = self._train(plan, checkpoint, start)
        if outcome.status is Status.FINISHED:
            self.export()
        self._report()
        return outcome

    def export(self) -> None:
        """Write the last checkpoint as a Hugging Face model, if that can be one."""
        if why_not_exported(self.job):
            return
        # Imported here: only a finished run needs the exporter.
        from meshwright.ship.hf import export_hf
        from meshwright.ship.start import commit_read

        saved = latest(self.rundir.checkpoints)
        if saved is None:
            raise RunError(f"{self.rundir.checkpoints}: the run left no checkpoint to export")
        folder = export_hf(
            self.job.model,
            commit_read(saved.path),
            self.data.prepared.tokenizer_path,
            self.data.prepared.end_of_text,
            self.rundir.path / MODEL_FOLDER,
        )
        self.rundir.append_event({"kind": Kind.MODEL_EXPORTED, "path": str(folder)})

    def finish(self) -> Outcome:
        """For a run that was stopped after its last step: write what it still owes."""
        self.signals.only_count()
        self.export()
        self._report()
        return Outcome(Status.FINISHED, self.job.job.steps, 0.0, None)

    def _train(self, plan: dict[str, Any], checkpoint: Path | None, start: Path | None) -> Outcome:
        resumed_from = None
        if checkpoint is not None:
            reader = Reader(checkpoint)
            resumed_from = reader.step
            self.rundir.restore(reader.meta.get("said", ()))
        self.rundir.drop_metrics_after(resumed_from or 0)
        with LiveView(self.job, plan, self.console) as view:

            def on_event(message: Mapping[str, Any]) -> None:
                self._learn_peak(plan, message)
                view.on_event(message)

            return conductor.run(
                self.engine,
                self.rundir,
                f"{WORKER}:main",
                self.job.layout.world,
                self._args(start),
                on_event,
                self.signals.count,
                started={"layout": self.job.layout.label, "resumed_from": resumed_from},
            )

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

    def _args(self, start: Path | None) -> dict[str, Any]:
        return {
            "job": self.job.model_dump(mode="json"),
            "train_prefix": str(self.data.prepared.train_prefix),
            "end_of_text": self.data.prepared.end_of_text,
            "held_out_prefix": str(self.data.prepared.held_out_prefix),
            "checkpoints": str(self.rundir.checkpoints.resolve()),
            "resume_from": None if start is None else str(start.resolve()),
            "baselines": self.data.baselines,
        }

    def _report(self) -> None:
        """A report that cannot be written must not hide how the run ended."""
        try:
            write_report(self.rundir.path)
        except OSError as error:
            self.console.print(f"no report: {error}", markup=False, soft_wrap=True)


def why_not_exported(job: Job) -> str | None:
    """One line if no class of transformers computes the model of `job`, else None."""
    try:
        check_exportable(job.model)
    except ConfigError as error:
        return str(error)
    return None
