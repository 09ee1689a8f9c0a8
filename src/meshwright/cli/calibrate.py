"""`meshwright calibrate`: a few steps of a small job, so that predictions fit this machine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.base.errors import RunError
from meshwright.cli.corpus import prepare_job
from meshwright.cli.options import AsJson, Overrides, log_console, print_json
from meshwright.cli.session import WORKER, Session
from meshwright.conduct.conductor import Status
from meshwright.conduct.local import LocalEngine
from meshwright.conduct.rundir import RunDir
from meshwright.conduct.signals import StopSignals
from meshwright.plan.auto import question_of
from meshwright.plan.calibration import calibrated, path_of, read_calibration
from meshwright.plan.job import Job, load_job, resolve_job
from meshwright.plan.prediction import predict

# As recipes/quickstart.toml.
_QUICKSTART: dict[str, Any] = {
    "job": {"name": "calibrate", "steps": 1},
    "model": {"preset": "tiny"},
    "data": {"seq_len": 256, "global_batch": 16},
    "layout": {"dp_replicate": 2, "tp": 2, "pp": 2, "micro_batch": 4},
    "cluster": {"ref": "local:8"},
}


def calibrate(
    job_file: Annotated[
        Path | None, typer.Argument(metavar="JOB.toml", help="Default: the quickstart's model.")
    ] = None,
    override: Overrides = None,
    steps: Annotated[int, typer.Option(min=6, max=1000, help="Steps to run.")] = 30,
    as_json: AsJson = False,
) -> int:
    """Run a few steps and keep what they say about this machine for later predictions."""
    job = load_job(job_file, override) if job_file else resolve_job(_QUICKSTART)
    job = job.model_copy(
        update={"job": job.job.model_copy(update={"steps": steps, "eval_every": steps})}
    )
    ref = job.cluster.ref
    before = predict(question_of(job, calibrated(ref)), job.layout).step_time_s
    peak = _run(job)
    after = predict(question_of(job, calibrated(ref)), job.layout)
    known = read_calibration(ref)
    found = {
        "file": str(path_of(ref)),
        "cluster": ref,
        "measured_step_time_s": known.runs[-1].step_time_s,
        "predicted_before_s": before,
        "predicted_step_time_s": after.step_time_s,
        "runs": len(known.runs),
        "peak_flops_per_chip": peak,
        "constants": {name: constant.value for name, constant in known.constants.items()},
    }
    if as_json:
        print_json(found)
    else:
        _show(found)
    return 0


def _run(job: Job) -> float:
    """Run `job`, which keeps its speed; the peak that its first worker measured."""
    console = log_console()
    with (
        StopSignals() as signals,
        LocalEngine.start(WORKER) as engine,
        tempfile.TemporaryDirectory() as scratch,
    ):
        data = prepare_job(job, console)
        with RunDir.create_at(Path(scratch) / "run") as rundir:
            outcome = Session(engine, rundir, job, data, console, signals).run(None)
            if outcome.status is Status.INTERRUPTED:
                raise KeyboardInterrupt
            if outcome.status is not Status.FINISHED:
                raise RunError(outcome.error or "the calibrating run failed")
            plan = json.loads((rundir.path / "plan.json").read_text())
    return float(plan["peak_flops_per_chip"] or 0.0)


def _show(found: dict[str, Any]) -> None:
    typer.echo(
        f"{found['cluster']}: {found['measured_step_time_s']:.3g} s a step measured, "
        f"{found['predicted_before_s']:.3g} s predicted before, "
        f"{found['predicted_step_time_s']:.3g} s now ({found['runs']} runs)"
    )
    typer.echo("fitted: " + ", ".join(f"{k} {v:.3g}" for k, v in found["constants"].items()))
    typer.echo(f"kept in {found['file']}")
