"""From elements to stored bytes and back: bytes of arrays, hashes, dtypes, what a seal binds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint import codec as codecs
from meshwright.checkpoint.files import Body
from meshwright.checkpoint.packs import xxh3
from meshwright.checkpoint.pieces import Piece

Array = NDArray[Any]


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of that name. Raises CheckpointError."""
    try:
        # numpy alone has no bfloat16 nor float8.
        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError as error:
        raise CheckpointError(f"dtype {name} is unknown to numpy and to ml_dtypes") from error
    if found.hasobject:
        raise CheckpointError(f"dtype {name} holds objects; a checkpoint holds numbers")
    return found


def bytes_of(array: Array) -> memoryview:
    """The bytes of a contiguous array, not copied."""
    return memoryview(array.view(np.uint8).data) if array.size else memoryview(b"")


def digest(arrays: Sequence[Array]) -> str:
    """xxh3 of the elements of contiguous arrays, one after another."""
    return xxh3(*map(bytes_of, arrays))


def encoded(codec: str, array: Array) -> Body:
    """The elements as `codec` stores them; raw ones are not copied."""
    return bytes_of(array) if codec == "raw" else codecs.encode(codec, array)


def chunk_bound(of: Sequence[str], piece: Piece, dtype: str, codec: str) -> tuple[object, ...]:
    """What a chunk is sealed to: where it belongs and how it is made. `piece` is the chunk as a
    piece of the first tensor of `of`."""
    where = [piece.box_offset, piece.box_shape, piece.start, piece.stop]
    size = len(of) * piece.size * dtype_of(dtype).itemsize
    return list(of), piece.global_shape, *where, dtype, codec, size
