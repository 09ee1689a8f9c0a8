"""The commands of `meshwright`, and the one place that turns errors into exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO

import typer

from meshwright.base.errors import MeshwrightError
from meshwright.cli import (
    calibrate,
    check,
    checkpoint,
    cluster,
    cluster_scripts,
    data,
    drill,
    dryrun,
    generate,
    job,
    jobs,
    plan,
    predict,
    report,
    train,
    up,
    validate,
)
from meshwright.cli import run as run_command

app = typer.Typer(
    name="meshwright",
    help="Plan, run and keep alive the training of very large models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("check")(check.check)
app.command("plan")(plan.plan)
app.command("predict")(predict.predict)
app.command("dryrun")(dryrun.dryrun)
app.command("calibrate")(calibrate.calibrate)
app.command("report")(report.report)
app.command("drill")(drill.drill)
app.command("up")(up.up)
cluster_scripts.add_to(cluster.cluster)
app.add_typer(cluster.cluster, name="cluster")
jobs.add_to(job.job)
app.add_typer(job.job, name="job")
app.add_typer(data.data, name="data")
app.add_typer(checkpoint.checkpoint, name="checkpoint")
app.command("run", context_settings=run_command.CONTEXT)(run_command.run)
app.command("generate")(generate.generate)
app.command("validate")(validate.validate)


def run() -> int:
    """Run the command that `sys.argv` names; the exit code."""
    return exit_code(lambda: app(standalone_mode=False))


def exit_code(command: Callable[[], int | None]) -> int:
    """Of `command`; what it raises is one line on stderr. KeyboardInterrupt passes."""
    try:
        status = command()
    except MeshwrightError as error:
        return _complain(str(error), error.exit_code)
    except typer.TyperException as error:
        if len(sys.argv) == 1:  # the help has been printed
            return 2
        return _complain(f"{error.format_message()}; see meshwright --help", 2)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except BrokenPipeError:  # whoever read our output has had enough
        _discard(sys.stdout)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}", 1)
    return status or 0


def _complain(line: str, exit_code: int) -> int:
    try:
        typer.echo(f"error: {' '.join(line.split())}", err=True)
    except OSError:  # nobody is there to read it; the exit code still tells
        _discard(sys.stderr)
    return exit_code


def _discard(stream: TextIO) -> None:
    """What is still to be written to `stream` goes nowhere; Python flushes it on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
