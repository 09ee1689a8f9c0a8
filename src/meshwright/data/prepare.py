"""From a corpus to token stores, once: built in a cache folder and reused when nothing changed.

A build happens in a folder of its own that is renamed into place when whole, so a kill leaves
nothing half-used, and of two builders at once the first to finish wins and both use its result.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from meshwright.base.errors import DataError
from meshwright.data.corpus import Corpus, Document, find_corpus, only_text, read_pieces, split
from meshwright.data.store import write_store
from meshwright.data.tokenizer import (
    TextTokenizer,
    check_fits,
    check_trainable,
    load_tokenizer,
    train_bpe,
)

Progress = Callable[[str, float], None]

FORMAT = 1
TRAIN_OWN = "bpe"

_MANIFEST = "manifest.json"
_BUILDING = ".building-"
_ABANDONED_S = 24 * 3600.0
_BATCH_CHARS = 2_000_000


@dataclass(frozen=True)
class Prepared:
    """Stores and tokenizer, ready to train on.

    `manifest` holds `format, source, vocab, tokenizer_size, tokenizer_sha256, end_of_text`, for
    `train` and `held_out` each `documents, text_bytes, tokens`, over all `files, bytes, tokens`,
    and under `sizes` the bytes of each file beside it.
    """

    train_prefix: Path
    held_out_prefix: Path
    tokenizer_path: Path
    end_of_text: int
    manifest: dict[str, Any]


def prepare(
    source: str, tokenizer: str, vocab: int, cache_dir: Path, progress: Progress
) -> Prepared:
    """Tokenize a corpus into a training and a held-out store under `cache_dir`, or reuse them.

    `source` and `tokenizer` are those of `[data]`, `vocab` that of the model. They are reused as
    long as paths, sizes and times of change of the files, the vocab and the tokenizer are equal.
    `progress(what, done)` is called with `done` from 0 to 1. Starts threads in this process that
    stay: call it where nothing is forked later. Raises DataError or ConfigError, before anything
    is written where the input is to blame.
    """
    corpus = find_corpus(source)
    own = _user_tokenizer(tokenizer, vocab)
    key = _key(corpus, own, vocab)
    final = cache_dir / key
    if ready := _open(final):
        return ready
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _sweep(cache_dir)
        building = cache_dir / f"{_BUILDING}{uuid4().hex}"
        building.mkdir()
        try:
            _build(building, corpus, own, vocab, progress)
            if _key(find_corpus(source), own, vocab) != key:
                raise DataError(f"data.source = {source!r}: changed during reading; run again")
            return _publish(building, final)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        reason = f"{error.strerror or error}; free space there or use another folder"
        raise DataError(f"data cache {cache_dir}: {reason}") from error


def _user_tokenizer(tokenizer: str, vocab: int) -> TextTokenizer | None:
    """The tokenizer that the user names; None where one is to be trained and `vocab` allows it."""
    if tokenizer == TRAIN_OWN:
        check_trainable(vocab)
        return None
    own = load_tokenizer(Path(tokenizer))
    check_fits(own, vocab, tokenizer)
    return own


def _key(corpus: Corpus, own: TextTokenizer | None, vocab: int) -> str:
    files = [(str(file.path), file.size, file.mtime_ns) for file in corpus.files]
    identity = [FORMAT, corpus.name, vocab, own.to_json() if own else TRAIN_OWN, files]
    return sha256(json.dumps(identity).encode()).hexdigest()[:20]


def _open(folder: Path) -> Prepared | None:
    """What `folder` holds if it is whole, judged by the size of every file."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        for name, size in manifest["sizes"].items():
            if (folder / name).stat().st_size != size:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return Prepared(
        train_prefix=folder / "train",
        held_out_prefix=folder / "held_out",
        tokenizer_path=folder / "tokenizer.json",
        end_of_text=manifest["end_of_text"],
        manifest=manifest,
    )


def _build(
    folder: Path, corpus: Corpus, own: TextTokenizer | None, vocab: int, progress: Progress
) -> None:
    progress("reading text", 0.0)
    text = only_text(corpus)
    train, held_out = split(text)
    progress("training the tokenizer", 0.02)
    tokenizer = own or train_bpe(train, vocab)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    total_bytes = sum(file.size for file in text.files)
    meter = _Meter(progress, done=0.15, per_byte=0.85 / total_bytes)
    parts = {
        "train": _encode(folder / "train", train, tokenizer, vocab, meter),
        "held_out": _encode(folder / "held_out", held_out, tokenizer, vocab, meter),
    }
    manifest = {
        "format": FORMAT,
        "source": corpus.name,
        "vocab": vocab,
        "tokenizer_size": tokenizer.size,
        "tokenizer_sha256": sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        "end_of_text": tokenizer.end_of_text,
        "files": len(text.files),
        "bytes": total_bytes,
        "tokens": sum(part["tokens"] for part in parts.values()),
        **parts,
        "sizes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    progress("publishing the stores", 1.0)


class _Meter:
    """Turns bytes of text encoded into overall progress."""

    def __init__(self, progress: Progress, done: float, per_byte: float) -> None:
        self._progress, self._done, self._per_byte = progress, done, per_byte

    def advance(self, n_bytes: int) -> None:
        self._done = min(1.0, self._done + n_bytes * self._per_byte)
        self._progress("encoding text", self._done)


def _encode(
    prefix: Path,
    documents: tuple[Document, ...],
    tokenizer: TextTokenizer,
    vocab: int,
    meter: _Meter,
) -> dict[str, int]:
    with write_store(prefix, vocab, tokenizer.end_of_text) as writer:
        for batch in _batches(documents):
            encoded = tokenizer.encode_batch([text for text, _ in batch])
            for ids, (_, is_last) in zip(encoded, batch, strict=True):
                writer.add(ids)
                if is_last:
                    writer.end_document()
            meter.advance(sum(len(text.encode()) for text, _ in batch))
        return {
            "documents": len(documents),
            "text_bytes": sum(document.stop - document.start for document in documents),
            "tokens": writer.n_tokens,
        }


def _batches(documents: tuple[Document, ...]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of all documents in order, in lists of about `_BATCH_CHARS`."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for document in documents:
        for text, is_last in read_pieces(document):
            batch.append((text, is_last))
            size += len(text)
            if size >= _BATCH_CHARS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _publish(building: Path, final: Path) -> Prepared:
    """Rename `building` to `final`, or use what another process has published there meanwhile."""
    if final.exists() and not _open(final):  # damaged since: its files are no use to anyone
        damaged = building.with_name(f"{building.name}-damaged")
        final.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        building.rename(final)
    except OSError:
        if not final.is_dir():
            raise
    if ready := _open(final):
        return ready
    raise DataError(f"data cache {final}: damaged while it was being built; run again")


def _sweep(cache_dir: Path) -> None:
    """Remove what killed builds left: a live one writes a file far more often than once a day."""
    for folder in cache_dir.glob(f"{_BUILDING}*"):
        with suppress(FileNotFoundError):  # its builder is just publishing it
            times = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
            if time.time() - max(times) > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)
