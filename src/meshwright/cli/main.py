"""The `meshwright` command: its commands, and one place that turns errors into exit codes."""

from __future__ import annotations

import sys

import click
import typer

from meshwright.base.errors import MeshwrightError
from meshwright.cli import check, generate, report, train

_INTERRUPTED = 130

app = typer.Typer(
    name="meshwright",
    help="Plan, run and keep alive the training of very large models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("check")(check.check)
app.command("report")(report.report)
app.command("generate")(generate.generate)


def main() -> None:
    """Run the command line and exit: 0 success, 1 what was checked does not hold or a run failed,
    2 wrong input, 130 interrupted. Errors are one line on stderr."""
    try:
        status = app(standalone_mode=False)
    except MeshwrightError as error:
        sys.exit(_complain(str(error), error.exit_code))
    except click.ClickException as error:
        sys.exit(_complain(f"{error.format_message()}; see meshwright --help", 2))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    sys.exit(status or 0)


def _complain(line: str, exit_code: int) -> int:
    typer.echo(f"error: {' '.join(line.split())}", err=True)
    return exit_code


if __name__ == "__main__":
    main()
