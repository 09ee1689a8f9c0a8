"""A folder made by `meshwright data build` as the source of a run."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from meshwright.base.errors import ConfigError, DataError
from meshwright.data.ingest.run import MANIFEST, identity_of, read_manifest
from meshwright.data.opening import open_tokens
from meshwright.data.prepare import TRAIN_OWN, Prepared
from meshwright.data.store import check_tokenizer
from meshwright.data.tokenizer import load_tokenizer


def is_build(source: str) -> bool:
    """Whether `source` is such a folder."""
    folder = Path(source)
    stores = (folder / "train.idx", folder / "train.bin")
    return (folder / MANIFEST).is_file() and any(path.exists() for path in stores)


def open_build(source: str, tokenizer: str, vocab: int, folder: Path | None = None) -> Prepared:
    """What `data build` has made, ready to train on; `tokenizer` and `vocab` are those of the job.
    Of a source far away `folder` has what is here (see `far.mirror`).

    Raises DataError where it is no build of tokens or is torn, ConfigError where the tokenizer is
    another or has ids that the model has no row for.
    """
    folder = folder or Path(source)
    manifest = read_manifest(folder)
    if manifest["kind"] != "tokens":
        raise DataError(
            f"data.source = {source!r}: holds {manifest['kind']}, which no model here "
            "reads; build it with --kind tokens"
        )
    for part in ("train", "held_out"):
        if part in manifest:
            store = open_tokens(folder / part)  # a torn one is refused now
            check_tokenizer(store, manifest["tokenizer"]["sha256"], source)
    about = manifest["tokenizer"]
    if about["vocab"] > vocab:
        fix = f"{source} has {about['vocab']} ids; set it to that or more"
        raise ConfigError("model.vocab", vocab, fix)
    _check_tokenizer(source, tokenizer, about["sha256"])
    return Prepared(
        train_prefix=folder / "train",
        held_out_prefix=folder / "held_out",
        tokenizer_path=folder / "tokenizer.json",
        end_of_text=about["end_of_text"],
        manifest=_told(source, folder, manifest),
    )


def has_held_out(prepared: Prepared) -> bool:
    """Whether some of it can be evaluated on; what is prepared of text always can."""
    return prepared.held_out_prefix.with_suffix(".idx").exists()


def check_together(parts: Sequence[Prepared]) -> None:
    """Refuse sources of several tokenizers, or none to evaluate on. Raises DataError."""
    first = parts[0].manifest
    for part in parts[1:]:
        theirs = part.manifest
        if theirs["tokenizer_sha256"] != first["tokenizer_sha256"]:
            raise DataError(
                f"data.source = {theirs['source']!r}: its tokenizer is "
                f"{theirs['tokenizer_sha256'][:12]}, that of {first['source']!r} is "
                f"{first['tokenizer_sha256'][:12]}; ids of one mean nothing to the other: build "
                "all sources with the same --tokenizer"
            )
    if not any(map(has_held_out, parts)):
        raise DataError(
            f"data.source = {first['source']!r}: has nothing to evaluate on; build it with "
            "--held-out 0.01"
        )


def _check_tokenizer(source: str, tokenizer: str, sha: str) -> None:
    if tokenizer == TRAIN_OWN:
        return  # that of the build, then
    asked = sha256(load_tokenizer(Path(tokenizer)).to_json().encode()).hexdigest()
    if asked != sha:
        fix = f"{source} was built with another ({sha[:12]}, this is {asked[:12]}); leave it out"
        raise ConfigError("data.tokenizer", tokenizer, f"{fix} or build with it")


def _told(source: str, folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """As `Prepared.manifest`, of what a run remembers."""
    parts = [manifest[part] for part in ("train", "held_out") if part in manifest]
    return {
        "source": source,
        "tokenizer_sha256": manifest["tokenizer"]["sha256"],
        "files": len(manifest["files"]),
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "tokens": sum(part["tokens"] for part in parts),
        "manifest_sha256": identity_of(folder),
    }
