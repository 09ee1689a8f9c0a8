"""`meshwright validate`: published training runs, predicted again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from meshwright.base.errors import DataError
from meshwright.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from meshwright.plan.validate.report import Report
    from meshwright.plan.validate.time_report import Errors

DEFAULT_RUNS = Path("../shared/data/published_runs.csv")


def validate(
    runs: Annotated[
        Path, typer.Option("--runs", metavar="FILE", help="Runs, as published_runs.csv has them.")
    ] = DEFAULT_RUNS,
    as_json: AsJson = False,
) -> int:
    """Predict published training runs again and say how far off the planner is."""
    if not runs.is_file():
        raise DataError(f"{runs}: no such file; name one with --runs FILE")
    # Imported here: other commands start sooner without it.
    from meshwright.plan.validate.report import validate as predict_again

    report = predict_again(runs)
    if as_json:
        print_json(report.document())
    else:
        _show(report)
    return 0


def _show(report: Report) -> None:
    console = Console(width=150)
    table = Table("source", *2 * ("used", "refused", "median", "mean", "p90"))
    table.title = "|predicted / measured - 1|: step time, then peak memory"
    for name, kinds in report.sources.items():
        table.add_row(name, *_cells(kinds["step_time"]), *_cells(kinds["peak_memory"]))
    overall = report.overall
    table.add_section()
    table.add_row("all", *_cells(overall["step_time"]), *_cells(overall["peak_memory"]))
    console.print(table)
    _show_refused(report, console)
    worst = Table("row", "source", "", "error", "filled in", title="worst rows")
    for row in report.worst():
        filled = getattr(row, "assumed", None)  # rows of memory fill nothing in
        time = filled is not None
        what = "step time" if time else "peak memory"
        worst.add_row(row.id, row.source, what, f"{row.error:+.0%}", ", ".join(filled or ()))
    console.print(worst)


def _show_refused(report: Report, console: Console) -> None:
    table = Table("source", "rows", "refused, because", title="rows without a step time to compare")
    for name, reasons in sorted(report.refused_time.items()):
        for reason, count in reasons.most_common():
            table.add_row(name, str(count), reason)
    console.print(table)


def _cells(errors: Errors) -> list[str]:
    figures = (errors.median_abs_error, errors.mean_abs_error, errors.p90_abs_error)
    shares = ["" if figure is None else f"{figure:.1%}" for figure in figures]
    return [str(errors.used), str(errors.refused), *shares]
