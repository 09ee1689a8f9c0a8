"""Predict the published runs again and write the table of `RESULTS.md` anew."""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.cli.validate import DEFAULT_RUNS
from meshwright.plan.validate.report import Report, validate
from meshwright.plan.validate.time_report import Errors

PAGE = Path(__file__).with_name("RESULTS.md")
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"
HEAD = """\
| Source | Step time: rows used, refused | median, mean, p90 | Memory: rows used, refused | \
median, mean, p90 |
|---|---|---|---|---|
"""


def table(report: Report) -> str:
    """Errors by source and over all, as Markdown."""
    rows = [*report.sources.items(), ("**all**", report.overall)]
    return HEAD + "".join(
        f"| {name} | {_cells(kinds['step_time'])} | {_cells(kinds['peak_memory'])} |\n"
        for name, kinds in rows
    )


def _cells(errors: Errors) -> str:
    figures = (errors.median_abs_error, errors.mean_abs_error, errors.p90_abs_error)
    shown = ", ".join(f"{one:.1%}" for one in figures if one is not None)
    return f"{errors.used}, {errors.refused} | {shown}"


def replaced(page: str, new: str) -> str:
    """`page` with `new` between its two marks. Raises ValueError if one is missing."""
    before, after = page.index(BEGIN) + len(BEGIN), page.index(END)
    return page[:before] + new + page[after:]


def main() -> None:
    """Refresh the page; says why not where there are no published runs."""
    if not DEFAULT_RUNS.is_file():
        sys.stderr.write(f"{DEFAULT_RUNS}: no such file; RESULTS.md stays as it is\n")
        return
    new = replaced(PAGE.read_text(encoding="utf-8"), table(validate(DEFAULT_RUNS)))
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
