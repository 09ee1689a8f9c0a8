"""`meshwright job`: what can be asked of a run that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.base.config import toml_value
from meshwright.base.errors import ConfigError, InputError
from meshwright.cli.options import AsJson, log_console, print_json
from meshwright.conduct.asking import ask
from meshwright.plan.layout import Layout

job = typer.Typer(help="Ask something of a run that goes on.", no_args_is_help=True)


@job.command("resize")
def resize(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="Keys of [layout] to change.")
    ],
    as_json: AsJson = False,
) -> int:
    """Go on in another layout, without a stop; a run that survives losses can."""
    answer = ask(run, {"op": "resize", "layout": parse_layout(keys)})
    if error := answer.get("error"):
        raise InputError(f"{run}: {error}")
    if as_json:
        print_json(answer)
    else:
        log_console().print(f"{run}: will go on as {answer['layout']}")
    return 0


def parse_layout(texts: Sequence[str]) -> dict[str, Any]:
    """The keys and values of `dp_replicate=2 tp=4`. Raises ConfigError."""
    found: dict[str, Any] = {}
    for text in texts:
        key, sign, value = (part.strip() for part in text.partition("="))
        if not sign or not value or key not in Layout.model_fields:
            raise ConfigError("resize", text, "write it as KEY=VALUE, KEY one of [layout]")
        found[key] = toml_value(value)
    return found
