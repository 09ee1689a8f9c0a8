"""How commands reach the service, and how they show what it answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from meshwright.base.errors import RunError
from meshwright.control.client import Client

URL_VARIABLE = "MESHWRIGHT_URL"
DEFAULT_URL = "http://127.0.0.1:8470"
ADDRESS_FILE = "service.json"

Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar=URL_VARIABLE, help="Of the service; by default the one of this user."
    ),
]
Watching = Annotated[bool, typer.Option("--watch", help="Show it anew until Ctrl-C.")]
Waiting = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")]

_EVERY_S = 1.0
_POLL_S = 0.1


def as_part(word: str | None) -> str | None:
    """A name as it may stand in an address: whatever it is, it is one part of a path."""
    return None if word is None else quote(word, safe="")


def default_home() -> Path:
    """Where a service keeps everything: MESHWRIGHT_HOME, or the user's data folder."""
    default = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return Path(os.environ.get("MESHWRIGHT_HOME") or default / "meshwright")


def reach(url: str | None) -> Client:
    """The service that is named, else the one that this user has started, else the usual one."""
    if url is None:
        try:
            said = json.loads((default_home() / ADDRESS_FILE).read_text())
            url = str(said["url"])
        except (OSError, ValueError, KeyError):
            url = DEFAULT_URL
    return Client(url)


def show(draw: Callable[[], Any], watch: bool) -> None:
    """Print what `draw` gives; with `watch`, anew each second."""
    console = Console()
    if not watch:
        console.print(draw())
        return
    with Live(draw(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(_EVERY_S)
            live.update(draw(), refresh=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table for a person; numbers stand to the right."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        digits = bool(rows) and all(isinstance(row[number], int | float) for row in rows)
        found.add_column(name, justify="right" if digits else "left", overflow="fold")
    for row in rows:
        found.add_row(*(_cell(value) for value in row))
    return found


def await_operation(client: Client, operation: dict[str, Any], console: Console) -> dict[str, Any]:
    """Show the log of long work until it has ended; how it ended. Raises RunError if it failed."""
    shown = 0
    while True:
        found: dict[str, Any] = client.get(f"/operations/{operation['id']}")
        lines = client.get(f"/operations/{operation['id']}/log")
        for line in lines[shown:]:
            text = f"{line['phase']:<10} {line['line']}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        shown = len(lines)
        if found["status"] == "SUCCEEDED":
            return found
        if found["status"] == "FAILED":
            raise RunError(f"operation {found['id']} ({found['kind']}): {found['error']}")
        time.sleep(_POLL_S)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
