"""Where the bytes of a tensor lie as they are, to be copied by the kernel, not through arrays.

That is so in a store in a local folder which is not encrypted, for chunks that are stored raw and
in full, of pieces that hold long rows.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

import numpy as np

from meshwright.checkpoint.files import ToldFiles
from meshwright.checkpoint.holding import Holding
from meshwright.checkpoint.local import LocalFiles
from meshwright.checkpoint.packs import pack_name
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.record import Chunk
from meshwright.checkpoint.stored import read_stored

_SHORTEST_BYTES = 16 << 10  # a shorter one costs more to ask for than to copy by numpy
_NO_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@dataclass(frozen=True)
class Span:
    """Bytes [at, at + bytes) of a chunk of `tensor`, which belong `to` bytes behind the beginning
    of what was asked for."""

    tensor: str
    number: int  # of the chunk in its piece
    chunk: Chunk
    at: int
    bytes: int
    to: int


def raw_spans(reader: Reader, name: str, first: int, stop: int) -> list[Span] | None:
    """Where elements [first, stop) of the row-major tensor `name` lie; None if they must be
    decoded. Raises CheckpointError if there is no such tensor."""
    if _folder(reader.holding) is None or reader.holding.sealed:
        return None
    itemsize = reader.dtype(name).itemsize
    found: list[Span] = []
    for row in reader.stored(name):
        for number, cut in row.cuts():
            runs = list(_within(_runs(cut), first, stop))
            if not runs:
                continue
            chunk = row.chunks[number]
            if row.of != (name,) or chunk.codec != "raw" or chunk.bytes != cut.size * itemsize:
                return None
            mean_bytes = itemsize * sum(size for _, _, size in runs) / len(runs)
            if len(runs) > 1 and mean_bytes < _SHORTEST_BYTES:
                return None
            found += (
                Span(name, number, chunk, at * itemsize, size * itemsize, (to - first) * itemsize)
                for to, at, size in runs
            )
    return found


def copy_spans(holding: Holding, spans: Sequence[Span], descriptor: int, start: int) -> None:
    """Copy spans into a file, `start` bytes behind its beginning, within the kernel (which shares
    the blocks, where the file system can) once the hash of each chunk was found right.

    Raises DamagedCommitError, OSError.
    """
    folder = _folder(holding)
    assert folder is not None, "raw_spans gives none for others"
    for (pack, at), group in groupby(spans, lambda span: (span.chunk.pack, span.chunk.at)):
        several = list(group)
        first = several[0]
        size, xxh3 = first.chunk.bytes, first.chunk.xxh3
        body = memoryview(read_stored(holding, pack, at, size, xxh3, first.tensor, first.number))
        with (folder / pack_name(pack)).open("rb", buffering=0) as file:
            for span in several:
                plain = body[span.at : span.at + span.bytes]
                _copy(file.fileno(), at + span.at, plain, descriptor, start + span.to)


def write_at(descriptor: int, plain: memoryview, at: int) -> None:
    """Write all of `plain`, `at` bytes behind the beginning of a file. Raises OSError."""
    while plain:
        written = os.pwrite(descriptor, plain, at)
        plain, at = plain[written:], at + written


def _copy(source: int, start: int, plain: memoryview, target: int, at: int) -> None:
    """`plain` is what lies there, for file systems that cannot copy."""
    done = 0
    try:
        while done < len(plain):
            copied = os.copy_file_range(source, target, len(plain) - done, start + done, at + done)
            if not copied:
                break
            done += copied
    except OSError as error:
        if error.errno not in _NO_COPY:
            raise
    write_at(target, plain[done:], at + done)


def _folder(holding: Holding) -> Path | None:
    files = holding.files
    while isinstance(files, ToldFiles):
        files = files.files
    return files.root if isinstance(files, LocalFiles) else None


def _runs(piece: Piece) -> Iterator[tuple[int, int, int]]:
    """Stretches of the row-major tensor that lie together in a piece: where they begin in the
    tensor and in the piece, and how long they are; all in elements."""
    shape = piece.global_shape
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for block in piece.blocks():
        whole = len(shape)  # from this axis on, the block is as wide as the tensor
        while whole and block.shape[whole - 1] == shape[whole - 1]:
            whole -= 1
        outer = block.shape[: max(whole - 1, 0)]
        size, at = prod(block.shape[len(outer) :]), block.at
        begin = sum(o * stride for o, stride in zip(block.offset, strides, strict=True))
        for index in np.ndindex(*outer):
            moved = sum(i * stride for i, stride in zip(index, strides, strict=False))
            yield begin + moved, at, size
            at += size


def _within(
    runs: Iterator[tuple[int, int, int]], first: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """The parts of runs that lie in [first, stop) of the tensor."""
    for begin, at, size in runs:
        low, high = max(begin, first), min(begin + size, stop)
        if low < high:
            yield low, at + low - begin, high - low
