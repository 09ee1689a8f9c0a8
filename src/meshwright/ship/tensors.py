"""Tensors of any commit, of whatever model and dtype, as safetensors files that others load."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path

from meshwright.base.errors import CheckpointError, ConfigError, InputError
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.spans import raw_spans
from meshwright.ship.tensor_file import Entry, check_dtype, write_shards


def export_tensors(
    reader: Reader,
    folder: Path,
    name_of: Callable[[str], str | None] = lambda name: name,
    max_shard_bytes: int = 5_000_000_000,
) -> int:
    """Write tensors of a commit into a new folder, each in the dtype that it has; the bytes that
    were copied as they lie in the store.

    `name_of` gives the name there of each tensor, None to leave it out. The folder appears by one
    rename. Raises InputError if there is one already, two tensors get one name or none gets one,
    CheckpointError if a tensor cannot be read or written.
    """
    if max_shard_bytes < 1:
        raise ConfigError("max_shard_bytes", max_shard_bytes, "at least 1")
    if folder.exists():
        raise InputError(f"{folder}: exists; name a new folder")
    entries: dict[str, Entry] = {}
    for ours in reader.names:
        if theirs := name_of(ours):
            if theirs in entries:
                raise InputError(f"{ours}: another is named {theirs} too; name it otherwise")
            entries[theirs] = _entry(reader, ours, theirs)
    if not entries:
        raise InputError(f"{reader.commit}: none of its tensors is chosen; see what it holds")
    tmp = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        copied = write_shards(tmp, list(entries.values()), max_shard_bytes, reader.holding)
        tmp.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error}); free space") from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return copied


def _entry(reader: Reader, ours: str, theirs: str) -> Entry:
    dtype, shape = reader.dtype(ours).name, reader.shape(ours)
    check_dtype(ours, dtype)
    spans = raw_spans(reader, ours, 0, prod(shape))
    return Entry(theirs, dtype, shape, partial(reader.read, ours), spans)
