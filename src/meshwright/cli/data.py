"""`meshwright data`: token stores and sample shards built, looked into and checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from meshwright.cli.data_trial import trial
from meshwright.cli.options import AsJson, log_console, print_json
from meshwright.data.ingest.filters import Rules
from meshwright.data.ingest.plan import BYTES, BuildOptions
from meshwright.data.ingest.records import Keys
from meshwright.data.ingest.run import build as build_data
from meshwright.data.ingest.verify import described, faults

data = typer.Typer(
    help="Build token stores and sample shards, look into them, check them.", no_args_is_help=True
)

data.command("trial")(trial)

Build = Annotated[
    str,
    typer.Argument(metavar="BUILD", help="What `data build` has built: a folder, or an address."),
]


@data.command("build")
def build(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to build.")],
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files or folders: text, .jsonl[.gz], .parquet, .tar, .zip, .fasta, MDS, Hugging "
            "Face data sets on disk.",
        ),
    ],
    kind: Annotated[str, typer.Option(metavar="tokens|samples")] = "tokens",
    tokenizer: Annotated[
        str, typer.Option(metavar="bytes|FILE", help="bytes, or a tokenizer.json.")
    ] = BYTES,
    dedup: Annotated[str, typer.Option(metavar="none|exact|minhash")] = "exact",
    held_out: Annotated[float, typer.Option(metavar="SHARE", help="Of the documents.")] = 0.0,
    text_key: Annotated[str, typer.Option(help="Where rows hold the text.")] = "text",
    licence_key: Annotated[str, typer.Option(help="Where rows hold the licence.")] = "licence",
    licence: Annotated[str, typer.Option(help="Of what names none.")] = "",
    allow_licence: Annotated[list[str] | None, typer.Option(help="Leave out all others.")] = None,
    least_chars: Annotated[int, typer.Option(help="Leave out shorter documents.")] = 1,
    most_chars: Annotated[int | None, typer.Option(help="Leave out longer ones.")] = None,
    least_letters: Annotated[float, typer.Option(help="Share of letters and blanks.")] = 0.0,
    most_repeated_lines: Annotated[float, typer.Option(help="Share of lines seen before.")] = 1.0,
    longest_mean_word: Annotated[float | None, typer.Option(help="Characters.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="The cores, by default.")] = None,
    restart: Annotated[bool, typer.Option(help="Throw an unfinished build away.")] = False,
    as_json: AsJson = False,
) -> int:
    """Turn sources into a token store or sample shards, with a manifest."""
    options = BuildOptions(
        kind=kind,
        tokenizer=tokenizer,
        dedup=dedup,
        held_out=held_out,
        keys=Keys(text_key, licence_key),
        rules=Rules(least_chars, most_chars, least_letters, most_repeated_lines, longest_mean_word),
        licence=licence,
        licences=tuple(allow_licence or ()),
    )
    console = log_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("data", total=1.0)

        def report(what: str, done: float) -> None:
            bar.update(task, description=what, completed=done)

        cores = processes or len(os.sched_getaffinity(0))
        manifest = build_data(sources, out, options, cores, report, restart)
    if as_json:
        print_json(manifest)
    else:
        _show_built(out, manifest)
    return 0


@data.command("inspect")
def inspect(
    build: Build,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a packed row.")] = 2048,
    as_json: AsJson = False,
) -> int:
    """Say what a build holds: documents, lengths, licences, how it packs."""
    document = described(build, seq_len)
    if as_json:
        print_json(document)
        return 0
    for key, value in document.items():
        inside = value if isinstance(value, dict) else {"": value}
        told = ", ".join(f"{name} {_plain(one)}".strip() for name, one in inside.items())
        typer.echo(f"{key.replace('_', ' ')}: {told or 'none'}")
    return 0


@data.command("verify")
def verify(build: Build, as_json: AsJson = False) -> int:
    """Read a build whole and compare it with its manifest; exit 1 where it differs."""
    found = list(faults(build))
    if as_json:
        print_json({"whole": not found, "faults": found})
    else:
        for line in found or [f"{build}: every byte is as it was built"]:
            typer.echo(line)
    return 1 if found else 0


def _show_built(out: Path, manifest: dict[str, Any]) -> None:
    for part in ("train", "held_out"):
        for name, count in manifest.get(part, {}).items():
            typer.echo(f"{part}: {count:,} {name}")
    for why, count in manifest["removed"].items():
        typer.echo(f"left out, {why}: {count:,}")
    typer.echo(f"built {out}")


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
