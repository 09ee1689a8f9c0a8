"""`meshwright predict`: what one layout takes, and why a run is slower than that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.base.errors import ConfigError, InputError
from meshwright.catalog import cluster as find_cluster
from meshwright.cli import plan_options as options
from meshwright.cli.kept import Kept, price_words
from meshwright.cli.options import AsJson, Overrides, print_json
from meshwright.cli.plan_text import show_assumptions, show_details
from meshwright.plan.auto import question_of
from meshwright.plan.calibration import calibrated
from meshwright.plan.explain import bound, neighbours
from meshwright.plan.explain_gap import Gap, gap, measured_step_s
from meshwright.plan.job import load_job
from meshwright.plan.layout import Layout
from meshwright.plan.prediction import Prediction, layout_of
from meshwright.plan.prediction import predict as price
from meshwright.plan.search import search
from meshwright.plan.search_notation import layout_precision, parse_layout
from meshwright.plan.search_question import Question, Wishes
from meshwright.plan.trace import trace as trace_of

MOVES = 5  # single changes of a layout that are shown


def predict(
    job_file: Annotated[
        Path | None, typer.Argument(metavar="JOB.toml", help="Job file; or --model and --cluster.")
    ] = None,
    override: Overrides = None,
    model: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="As of plan.")] = None,
    cluster: Annotated[str | None, typer.Option(metavar="NAME:CHIPS", help="As of plan.")] = None,
    layout: options.LayoutText = None,
    measured: options.Measured = None,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    framework: options.FrameworkName = None,
    precision: options.PrecisionName = None,
    catalogue: options.Catalogue = None,
    constants: options.ConstantsFile = None,
    trace: options.Trace = None,
    as_json: AsJson = False,
) -> int:
    """Predict time, memory and money of one layout; with --measured, explain a shortfall."""
    if (job_file is None) == (model is None):
        raise InputError("give a JOB.toml, or --model with --cluster and --layout")
    wishes = Wishes(seq_len, global_batch, precision, framework, catalogue=catalogue)
    kept = None
    if job_file is not None:
        kept = Kept.of(load_job(job_file, override)) if not (layout or cluster) else None
        _refuse_idle(wishes, constants)
        question, chosen = _of_job(job_file, override, cluster, catalogue)
        if layout:
            chosen = parse_layout(layout, question.cluster.chips, question.precision)
    else:
        if override:
            raise InputError("--override: changes a JOB.toml, but --model is given")
        question, chosen = _of_model(str(model), cluster, layout, wishes, constants)
    here = price(question, chosen)
    why = _gap(question, chosen, measured) if measured else None
    if trace:
        trace.write_text(json.dumps(trace_of(question, chosen)), encoding="utf-8")
    if as_json:
        document = {**here.document(), "gap": why and why.document()}
        print_json({**document, "redundancy": kept and kept.document()})
    else:
        _show(question, here, why)
        if kept is not None:
            for one in kept.prices:
                of_run = " (of this job)" if one == kept.chosen else ""
                typer.echo(f"redundancy: {price_words(one.document())}{of_run}")
    return 0


def _refuse_idle(wishes: Wishes, constants: Path | None) -> None:
    """A job file says these itself."""
    given = {
        "--seq-len": (wishes.seq_len, "use -o data.seq_len=N"),
        "--global-batch": (wishes.global_batch, "use -o data.global_batch=N"),
        "--framework": (wishes.framework, "a job is for our own trainer; leave it out"),
        "--precision": (wishes.precision, "use -o layout.precision=NAME"),
        "--constants": (constants, "a job takes those of its cluster; leave it out"),
    }
    for option, (value, fix) in given.items():
        if value is not None:
            raise ConfigError(option, value, f"does nothing beside a JOB.toml; {fix}")


def _of_job(
    job_file: Path, override: list[str] | None, cluster: str | None, catalogue: Path | None
) -> tuple[Question, Layout]:
    job = load_job(job_file, override)
    question = question_of(job, calibrated(cluster or job.cluster.ref))
    if cluster:
        question = question.on(find_cluster(cluster, catalogue))
    return question, job.layout


def _of_model(
    model: str, cluster: str | None, layout: str | None, wishes: Wishes, constants: Path | None
) -> tuple[Question, Layout]:
    if cluster is None:
        raise InputError("--cluster: is needed with --model, as p5:64")
    question, reading = options.the_question(model, cluster, wishes, constants)
    if layout:
        return question, parse_layout(layout, question.cluster.chips, question.precision)
    if reading is None or not reading.layout:
        raise InputError("--layout: say which one, as tp8,pp4; `meshwright plan` finds the best")
    read = reading.to_layout()
    return question, read.model_copy(update={"precision": layout_precision(question.precision)})


def _gap(question: Question, layout: Layout, measured: str) -> Gap:
    seconds = measured_step_s(question, measured)
    found = search(question)
    best = None
    if len(found.best):
        best = price(question, layout_of(question, found.best.candidates, 0))
    return gap(question, layout, seconds, best)


def _show(question: Question, here: Prediction, why: Gap | None) -> None:
    one: dict[str, Any] = here.document()
    typer.echo(
        f"{here.name} on {question.cluster.name}: {here.step_time_s:.4g} s a step "
        f"({here.step_time_low_s:.3g} to {here.step_time_high_s:.3g}), "
        f"{here.tokens_per_s_per_chip:,.0f} tokens/s/chip, MFU {here.mfu:.1%}, "
        f"{here.tflops_per_chip:.4g} TFLOP/s a chip"
    )
    show_details(one)
    typer.echo(f"probability of running out of memory: {here.oom_probability:.1%}")
    if here.dollars_per_trillion_tokens:
        typer.echo(f"dollars per trillion tokens: {here.dollars_per_trillion_tokens:,.0f}")
    typer.echo(f"bound by: {bound(here)}")
    moves = [
        f"{one.what}: {one.speedup - 1:+.0%}" + ("" if one.fits else " (does not fit)")
        for one in neighbours(replace(question, risk=options.DEFAULT_RISK), here.layout)
    ]
    typer.echo("single changes of the layout: " + ("; ".join(moves[:MOVES]) or "none is legal"))
    if why:
        typer.echo(f"measured: {why.measured_s:.4g} s a step, of which")
        for name, seconds in why.seconds.items():
            if abs(seconds) > 0.002 * why.measured_s:
                typer.echo(f"  {seconds:9.4g} s  {seconds / why.measured_s:6.1%}  {name}")
        for line in why.diagnosis:
            typer.echo(f"  - {line}")
    show_assumptions(one)
