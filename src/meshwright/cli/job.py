"""`meshwright job`: what can be asked of a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.base.errors import ConfigError, InputError
from meshwright.cli.options import AsJson, log_console, print_json
from meshwright.conduct.asking import ask

job = typer.Typer(help="Ask something of a run that goes on.", no_args_is_help=True)


@job.command("resize")
def resize(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    size: Annotated[str, typer.Argument(metavar="dp_replicate=N", help="Replicas to go on with.")],
    as_json: AsJson = False,
) -> int:
    """Go on with more or fewer replicas, without a stop; a run that survives losses can."""
    answer = ask(run, {"op": "resize", "dp_replicate": parse_size(size)})
    if error := answer.get("error"):
        raise InputError(f"{run}: {error}")
    if as_json:
        print_json(answer)
    else:
        log_console().print(f"{run}: will go on with dp_replicate = {answer['accepted']}")
    return 0


def parse_size(text: str) -> int:
    """The N of `dp_replicate=N`. Raises ConfigError."""
    key, _, value = text.partition("=")
    if key.strip() != "dp_replicate" or not value.strip().isdigit() or int(value) < 1:
        raise ConfigError("resize", text, "write it as dp_replicate=N, N a number of replicas")
    return int(value)
