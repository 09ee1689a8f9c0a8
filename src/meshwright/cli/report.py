"""`meshwright report`: what a run directory says, as a page or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.options import AsJson, print_json
from meshwright.watch.history import read_run
from meshwright.watch.report import write_report
from meshwright.watch.summary import summary


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    as_json: AsJson = False,
) -> None:
    """Write RUN/report.html anew, also of a run that is still going on."""
    if as_json:
        print_json(summary(read_run(run)))
    else:
        typer.echo(write_report(run))
