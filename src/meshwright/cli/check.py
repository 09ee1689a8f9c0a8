"""`meshwright check`: does a layout train the same model as one process?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console
from rich.table import Table

from meshwright.base.errors import RunError
from meshwright.checkpoint.opening import StoreAt
from meshwright.cli.corpus import prepare_job
from meshwright.cli.options import AsJson, Overrides, log_console, print_json
from meshwright.cli.start import first_weights, refuse_bad_start
from meshwright.conduct import conductor
from meshwright.conduct.conductor import Status
from meshwright.conduct.local import LocalEngine
from meshwright.conduct.rundir import RunDir
from meshwright.conduct.signals import StopSignals
from meshwright.plan.activations import BYTES
from meshwright.plan.job import Job, load_job
from meshwright.plan.layout import Layout
from meshwright.train.compare import Comparison, Limits, TensorDifference, compare

CHECK_WORKER = "meshwright.train.check"


class TokenSource(Protocol):
    """The token stores to train on, and the token that ends their documents."""

    @property
    def train_prefix(self) -> Path | Sequence[Path]:
        """Path of the store without its endings, or of one for each source."""

    @property
    def end_of_text(self) -> int:
        """Token id."""


@dataclass(frozen=True)
class Tracing:
    """What traces that are to be compared share: `steps` steps on `data`, run by `engine` from the
    commit `start` (None: weights of their own), until `stop_requests` counts one."""

    engine: LocalEngine
    data: TokenSource
    steps: int
    stop_requests: Callable[[], int]
    start: str | None = None


def check(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="Job file.")],
    override: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare.")] = 4,
    as_json: AsJson = False,
) -> int:
    """Run the job's layout and one process for a few steps in fp32, and compare them."""
    console = log_console()
    job = load_job(job_file, override)
    layout = exact(job.layout)
    with (
        StopSignals() as signals,
        LocalEngine.start(CHECK_WORKER) as engine,
        tempfile.TemporaryDirectory() as scratch,
    ):
        refuse_bad_start(job)
        prepared = prepare_job(job, console)
        signals.only_count()
        shared = Tracing(engine, prepared, steps, signals.count)
        found = check_layout(job, layout, shared, Path(scratch))
    if as_json:
        print_json(found.as_json())
    else:
        _show(found, layout, console)
    return 0 if found.equal else 1


def check_layout(job: Job, layout: Layout, shared: Tracing, scratch: Path) -> Comparison:
    """Trace `job` in one process and under `layout`, and compare.

    Raises RunError if either run fails, KeyboardInterrupt if it was asked to stop.
    """
    shared = replace(shared, start=first_weights(job, StoreAt(str(scratch / "start"))))
    for name, how in (("reference", one_process(layout)), ("layout", layout)):
        trace(job, how, shared, scratch / name)
    return compare(scratch / "reference", scratch / "layout", Limits())


def exact(layout: Layout) -> Layout:
    """`layout` in fp32 throughout: what rounds on purpose would hide what is wrong. A budget for
    activations grows with their size, so that the same ones are recomputed."""
    larger = BYTES["fp32"] / BYTES[layout.precision]
    lossless = {
        "precision": "fp32",
        "fp8_scaling": "row",
        "grad_precision": "fp32",
        "grad_compression": "none",
        "activation_gib": layout.activation_gib * larger,
    }
    return layout.model_copy(update=lossless)


def one_process(layout: Layout) -> Layout:
    """The reference of `layout`: nothing split, sent, compressed, offloaded or made again."""
    return Layout(micro_batch=layout.micro_batch)


def trace(
    job: Job,
    layout: Layout,
    shared: Tracing,
    folder: Path,
    entry: str = f"{CHECK_WORKER}:main",
) -> None:
    """Run steps of `job` under `layout` and leave in `folder` what `compare` reads.

    `entry` is what the workers run. Raises RunError if a rank fails, KeyboardInterrupt if it was
    asked to stop.
    """
    prefix = shared.data.train_prefix
    args = {
        "job": job.model_copy(update={"layout": layout}).model_dump(mode="json"),
        "train_prefix": str(prefix) if isinstance(prefix, Path) else list(map(str, prefix)),
        "end_of_text": shared.data.end_of_text,
        "steps": shared.steps,
        "out_dir": str(folder),
    }
    if shared.start is not None:
        args["start_from"] = shared.start
    with RunDir.create_at(folder) as rundir:
        outcome = conductor.run(
            shared.engine, rundir, entry, layout.world, args, lambda _: None, shared.stop_requests
        )
        if outcome.status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        if outcome.status is not Status.FINISHED:
            raise RunError(_failure(outcome.error, rundir))


def _failure(error: str | None, rundir: RunDir) -> str:
    """The scratch folder goes, so the error carries all there is to say."""
    reason = (error or "it failed").partition("; log:")[0]
    return f"{rundir.id} run: {reason}"


def _show(found: Comparison, layout: Layout, console: Console) -> None:
    steps = Table("step", "loss", "rel", "grad norm", "rel", title=f"{layout.label} : one process")
    for row in found.steps:
        steps.add_row(
            str(row.step),
            f"{row.loss:.6f}",
            f"{row.loss_rel:.1e}",
            f"{row.grad_norm:.6f}",
            f"{row.grad_norm_rel:.1e}",
        )
    tensors = Table("worst tensors", "", "rel", "norm ratio")
    for one in found.worst[:10]:
        tensors.add_row(one.name, one.what, f"{one.rel:.1e}", f"{one.norm_ratio:.6f}")
    console.print(steps, tensors)
    typer.echo(verdict(found))


def verdict(found: Comparison) -> str:
    """One line: equal or not, and what is worst."""
    bounds = f"loss rel {found.loss_rel:.1e}, gradient norm rel {found.grad_norm_rel:.1e}"
    if found.equal:
        left_out = f", {len(found.noise)} parameters without a gradient" if found.noise else ""
        return f"equal: {bounds}, {len(found.tensors)} tensors within bounds{left_out}"
    wrong = [one for one in found.tensors if not one.equal]
    names = ", ".join(_name(one) for one in wrong[:3]) or "all tensors within bounds"
    return f"NOT equal: {bounds}; {len(wrong)} tensors out of bounds: {names}"


def _name(one: TensorDifference) -> str:
    return f"{one.what} of {one.name} (rel {one.rel:.1e}, ratio {one.norm_ratio:.4f})"
