"""safetensors files written in place: a header, then each tensor's bytes, from wherever they are.

Format: https://github.com/huggingface/safetensors#format. Unlike the library's writer this one
holds no file in memory, takes every dtype, and copies what lies in a store as it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.chunks import bytes_of, dtype_of
from meshwright.checkpoint.holding import Holding
from meshwright.checkpoint.spans import Span, copy_spans, write_at

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_BLOCK_BYTES = 4096  # the header is filled up to it, so that a file system can share blocks
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its bytes are `spans` of the store `holding`, or what `array` gives."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    array: Callable[[], NDArray[Any]]
    spans: Sequence[Span] | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * dtype_of(self.dtype).itemsize


def write_shards(
    folder: Path, entries: Sequence[Entry], max_bytes: int, holding: Holding | None = None
) -> int:
    """Write a model's tensors in order as one file, or several and their index, none larger than
    `max_bytes` but one with a single tensor; as `write_tensors`."""
    shards = _shards(entries, max_bytes)
    names = list(_shard_names(len(shards)))
    held = list(zip(names, shards, strict=True))
    copied = sum(write_tensors(folder / name, shard, holding) for name, shard in held)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(entry.size_bytes for entry in entries)},
            "weight_map": {entry.name: name for name, shard in held for entry in shard},
        }
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return copied


def write_tensors(path: Path, entries: Sequence[Entry], holding: Holding | None = None) -> int:
    """Write a new file; the bytes of it that were copied as they lie in the store.

    One array is held at a time. Raises CheckpointError if a dtype has no name in the format or a
    tensor cannot be read, OSError if the file cannot be written.
    """
    header, starts = _header(entries)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_at(descriptor, memoryview(header), 0)
        end = max((start + e.size_bytes for start, e in _placed(entries, starts)), default=0)
        os.truncate(descriptor, max(end, len(header)))

        def copy(placed: tuple[int, Entry]) -> int:
            start, entry = placed
            if holding is None or entry.spans is None:
                return 0
            copy_spans(holding, entry.spans, descriptor, start)
            return entry.size_bytes

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            copied = sum(pool.map(copy, _placed(entries, starts)))
        for start, entry in _placed(entries, starts):
            if entry.spans is None:
                _write_array(descriptor, start, entry)
    finally:
        os.close(descriptor)
    return copied


def check_dtype(name: str, dtype: str) -> None:
    """Raises CheckpointError if safetensors has no name for the dtype of the tensor `name`."""
    if dtype not in _DTYPES:
        raise CheckpointError(f"{name}: safetensors has no dtype {dtype}; leave it out")


def _write_array(descriptor: int, start: int, entry: Entry) -> None:
    array = entry.array()
    if array.dtype != dtype_of(entry.dtype) or array.shape != entry.shape:
        raise CheckpointError(
            f"{entry.name}: is {array.dtype} of shape {array.shape}, to be written as "
            f"{entry.dtype} of shape {entry.shape}"
        )
    write_at(descriptor, bytes_of(np.ascontiguousarray(array).reshape(-1)), start)


def _shards(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        held = sum(one.size_bytes for one in shards[-1])
        if shards[-1] and held + entry.size_bytes > max_bytes:
            shards.append([])
        shards[-1].append(entry)
    return shards


def _shard_names(count: int) -> Iterator[str]:
    if count == 1:
        yield SINGLE_NAME
        return
    for number in range(1, count + 1):
        yield f"model-{number:05d}-of-{count:05d}.safetensors"


def _header(entries: Sequence[Entry]) -> tuple[bytes, dict[str, int]]:
    """The beginning of the file, and where each tensor begins in the file. Wide dtypes come first,
    so that each tensor is aligned."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    at = 0
    for entry in sorted(entries, key=lambda entry: -dtype_of(entry.dtype).itemsize):
        check_dtype(entry.name, entry.dtype)
        offsets[entry.name] = at
        table[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.size_bytes],
        }
        at += entry.size_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    size = -(-(8 + len(text)) // _BLOCK_BYTES) * _BLOCK_BYTES
    header = (size - 8).to_bytes(8, "little") + text.ljust(size - 8)
    return header, {name: size + offset for name, offset in offsets.items()}


def _placed(entries: Sequence[Entry], starts: dict[str, int]) -> Iterator[tuple[int, Entry]]:
    return ((starts[entry.name], entry) for entry in entries)
