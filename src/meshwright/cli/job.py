"""`meshwright job`: jobs of the service, and what can be asked of a run that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.base.config import toml_value
from meshwright.base.errors import ConfigError, InputError
from meshwright.cli.elsewhere import lease_of
from meshwright.cli.options import AsJson, log_console, print_json
from meshwright.cli.service import Url, as_part, reach
from meshwright.cli.session import WORKER
from meshwright.conduct.asking import ask
from meshwright.conduct.outpost import serve
from meshwright.conduct.signals import StopSignals
from meshwright.plan.layout import Layout

job = typer.Typer(
    help="Jobs of the service; resize and agent are for a run in a folder.", no_args_is_help=True
)

_INTERRUPTED = 130


@job.command("resize")
def resize(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of the run, or a job of the service.")
    ],
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="Keys of [layout] to change.")
    ],
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """Go on in another layout, without a stop; a run that survives losses can."""
    layout = parse_layout(keys)
    if run.name.startswith("job-") and not run.exists():
        with reach(url) as client:
            answer = client.send("POST", f"/jobs/{as_part(str(run))}/resize", {"layout": layout})
    else:
        answer = ask(run, {"op": "resize", "layout": layout})
    if error := answer.get("error"):
        raise InputError(f"{run}: {error}")
    if as_json:
        print_json(answer)
    else:
        log_console().print(f"{run}: will go on as {answer['layout']}")
    return 0


@job.command("agent")
def agent(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    node: Annotated[int, typer.Option("--node", help="Number of the node, from 0.")],
) -> int:
    """Be a node of a run that is conducted from another machine, until the run is over."""
    lease_s = lease_of(run, node)
    with StopSignals() as signals:
        signals.only_count()
        log_console().print(f"{run}: node {node} is here", markup=False, highlight=False)
        over = serve(run, node, WORKER, lease_s, signals.count)
    return 0 if over else _INTERRUPTED


def parse_layout(texts: Sequence[str]) -> dict[str, Any]:
    """The keys and values of `dp_replicate=2 tp=4`. Raises ConfigError."""
    found: dict[str, Any] = {}
    for text in texts:
        key, sign, value = (part.strip() for part in text.partition("="))
        if not sign or not value or key not in Layout.model_fields:
            raise ConfigError("resize", text, "write it as KEY=VALUE, KEY one of [layout]")
        found[key] = toml_value(value)
    return found
