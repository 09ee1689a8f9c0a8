"""Options and small helpers that several commands share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

Overrides = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="SECTION.KEY=VALUE", help="Override a job-file key."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def print_json(document: Any) -> None:
    """The one document that a command with `--json` writes to stdout."""
    typer.echo(json.dumps(document, indent=2))


def log_console() -> Console:
    """Where everything but results goes."""
    return Console(stderr=True)


def data_cache() -> Path:
    """Where prepared corpora are kept: MESHWRIGHT_CACHE, or the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"
    return Path(os.environ.get("MESHWRIGHT_CACHE") or default) / "data"
