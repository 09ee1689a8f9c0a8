"""`meshwright generate`: text from a trained model."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from meshwright.base.errors import InputError
from meshwright.cli.options import AsJson, print_json
from meshwright.cli.session import MODEL_FOLDER


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run, or a model folder.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Likeliest tokens to draw from; 0: all.")] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Print PROMPT and what the model of RUN makes of it."""
    folder = _model_folder(run)
    if any(
        "\ud800" <= letter <= "\udfff" for letter in prompt
    ):  # how bytes that are no text arrive
        raise InputError("--prompt: not valid UTF-8; write it as text")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin slow small models down
    # Imported here: it brings torch, which other commands do without.
    from meshwright.ship.generate import Generator

    start = time.perf_counter()
    stream = Generator(folder).generate(prompt, max_tokens, temperature, top_k, seed)
    pieces = []
    if not as_json:
        typer.echo(prompt, nl=False)
    for piece in stream:
        pieces.append(piece)
        if not as_json:
            typer.echo(piece, nl=False)
    if as_json:
        seconds = time.perf_counter() - start
        print_json({"prompt": prompt, "text": "".join(pieces), "seed": seed, "seconds": seconds})
    else:
        typer.echo()


def _model_folder(run: Path) -> Path:
    for folder in (run / MODEL_FOLDER, run):
        if (folder / "config.json").is_file():
            return folder
    raise InputError(f"{run}: holds no model; give a run that finished, or a model folder")
