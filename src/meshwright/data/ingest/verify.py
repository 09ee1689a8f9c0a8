"""Whether a build is what its manifest says, and what is in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.base.errors import DataError
from meshwright.data.checksums import BLOCK_BYTES, damaged_blocks
from meshwright.data.ingest.run import read_manifest
from meshwright.data.packing import PackedRows
from meshwright.data.samples import open_samples
from meshwright.data.store import TokenStore, open_store

_SAMPLED_WINDOWS = 50
_CHUNK = 1 << 24


def open_built(folder: Path, part: str, tokenizer_sha256: str | None = None) -> TokenStore:
    """The token store `part` of a build. Raises DataError where it is absent, or its tokenizer is
    not the one of `tokenizer_sha256`."""
    manifest = read_manifest(folder)
    if manifest["kind"] != "tokens" or part not in manifest:
        raise DataError(f"{folder}: has no tokens for {part}; build it with --kind tokens")
    own = manifest["tokenizer"]["sha256"]
    if tokenizer_sha256 not in (None, own):
        raise DataError(
            f"{folder}: tokenizer {own[:12]}, but {str(tokenizer_sha256)[:12]} is wanted; ids of "
            "one mean nothing to the other: build all sources with the same --tokenizer"
        )
    return open_store(folder / part)


def open_together(folders: Sequence[Path], part: str) -> list[TokenStore]:
    """The token store `part` of several builds, which must share a tokenizer. Raises DataError."""
    first = read_manifest(folders[0])["tokenizer"].get("sha256")
    return [open_built(folder, part, first) for folder in folders]


def faults(folder: Path) -> Iterator[str]:
    """What is wrong with a build, one line each; reads all of it. Raises DataError if there is no
    manifest."""
    manifest = read_manifest(folder)
    missing = False
    for name, told in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            yield f"{path}: is gone; fetch or build it again"
            missing = True
        elif path.stat().st_size != told["bytes"]:
            yield f"{path}: has {path.stat().st_size} bytes, the manifest tells {told['bytes']}"
        elif path.suffix == ".bin" and path.with_suffix(".crc").is_file():
            yield from _damaged(path)
    if not missing:
        yield from _content(folder, manifest)


def _damaged(path: Path) -> Iterator[str]:
    sums = np.frombuffer(path.with_suffix(".crc").read_bytes(), "<u4")
    for block in damaged_blocks(path, sums):
        first = block * BLOCK_BYTES
        yield f"{path}: bytes {first} to {first + BLOCK_BYTES} are damaged; fetch or build it again"


def _content(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    for part in ("train", "held_out"):
        if part not in manifest:
            continue
        try:
            if manifest["kind"] == "tokens":
                yield from _outside(open_store(folder / part), manifest["tokenizer"])
            else:
                store = open_samples(folder / part)
                for index in range(len(store)):
                    store.read(index)
        except DataError as error:
            yield str(error)


def _outside(store: TokenStore, tokenizer: dict[str, Any]) -> Iterator[str]:
    """Ids that the tokenizer does not have, and documents without an end."""
    highest = max(
        int(store.tokens[at : at + _CHUNK].max()) for at in range(0, store.n_tokens, _CHUNK)
    )
    if highest >= tokenizer["vocab"]:
        yield f"{store.prefix}.bin: id {highest} is outside the vocab of {tokenizer['vocab']}"
    unended = int((store.tokens[store.starts[1:] - 1] != tokenizer["end_of_text"]).sum())
    if unended:
        yield f"{store.prefix}.bin: {unended} documents lack their end-of-text token"


def described(folder: Path, seq_len: int) -> dict[str, Any]:
    """What `data inspect` tells: the manifest's figures, lengths, how rows of `seq_len` pack."""
    manifest = read_manifest(folder)
    kept = ("kind", "sources", "tokenizer", "train", "held_out", "licences", "removed")
    document = {key: manifest[key] for key in kept if key in manifest}
    if manifest["kind"] == "tokens":
        store = open_store(folder / "train")
        rows = PackedRows(store, seq_len)
        windows = -(-len(rows) // 64)
        some = range(0, windows, max(1, windows // _SAMPLED_WINDOWS))
        document["dtype"] = str(store.tokens.dtype)
        document["document_tokens"] = _quantiles(np.diff(store.starts))
        document["packing"] = {
            "seq_len": seq_len,
            "rows": len(rows),
            "full": rows.efficiency,
            "whole_documents": rows.whole_share(some),
        }
    else:
        samples = open_samples(folder / "train")
        document["sample_bytes"] = _quantiles(np.diff(samples.offsets))
        document["fields"] = sorted(samples.read(0).fields)
    return document


def _quantiles(lengths: Any) -> dict[str, int]:
    names = {"least": 0.0, "median": 0.5, "p90": 0.9, "most": 1.0}
    return {name: int(np.quantile(lengths, q)) for name, q in names.items()}
