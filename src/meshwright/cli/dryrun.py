"""`meshwright dryrun`: what one rank of a job would hold, compute and send, without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from meshwright.cli.options import AsJson, Overrides, log_console, print_json
from meshwright.plan.job import load_job
from meshwright.plan.rescale import rescaled

if TYPE_CHECKING:
    from meshwright.train.dryrun import DryRun


def dryrun(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="Job file.")],
    override: Overrides = None,
    world: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks; dp_replicate or dp_shard and global_batch follow."),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="The rank to execute.")] = 0,
    kernels: Annotated[
        Literal["fused", "cpu"], typer.Option(help="Norms and attention as GPUs or CPUs do them.")
    ] = "fused",
    as_json: AsJson = False,
) -> None:
    """Execute one step of one rank of the real trainer on tensors without memory: peak bytes by
    part, FLOPs and every collective."""
    job = load_job(job_file, override)
    if world is not None:
        job = rescaled(job, world)
    # Imported here: it brings torch, which is not needed to refuse a job.
    from meshwright.train.dryrun import dry_run

    found = dry_run(job, rank, kernels)
    if as_json:
        print_json(found.as_json())
    else:
        _show(found)


def _show(found: DryRun) -> None:
    console = log_console()
    memory = Table("part at the peak", "GiB", title=f"rank {found.rank} of {found.world}")
    for part, n_bytes in found.parts_bytes.items():
        memory.add_row(part, _gib(n_bytes))
    if found.host_bytes:
        memory.add_row("(host memory)", _gib(found.host_bytes))
    traffic = Table("axis", "collective", "ranks", "count", "payload GB", "wire GB")
    for one in found.traffic:
        row = (one.axis, one.kind, one.ranks, one.count)
        traffic.add_row(
            *map(str, row), f"{one.payload_bytes / 1e9:.4g}", f"{one.wire_bytes / 1e9:.4g}"
        )
    console.print(memory, traffic)
    for assumption in found.assumptions:
        console.print(f"assumed: {assumption}", highlight=False)
    flops = ", ".join(f"{phase} {count / 1e12:.4g}" for phase, count in found.flops.items())
    typer.echo(f"peak {_gib(found.peak_bytes)} GiB; TFLOPs a step: {flops}")


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.4g}"
