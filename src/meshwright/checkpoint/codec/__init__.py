"""Arrays as fewer bytes, without loss: whole ones, and what a step changed.

All of it is numpy, zstd and xxh3, which leave other threads running. A body that is torn, foreign
or made against something else raises CheckpointError.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.codec import planes
from meshwright.checkpoint.codec.adamw import Moments, Update, decode_update, encode_update
from meshwright.checkpoint.codec.body import torn
from meshwright.checkpoint.codec.change import decode_change, encode_change

__all__ = [
    "Moments",
    "Update",
    "decode",
    "decode_change",
    "decode_into",
    "decode_update",
    "encode",
    "encode_change",
    "encode_update",
]


def encode(codec: str, array: NDArray[Any]) -> bytes:
    """A 1-D array by codec "raw" or "planes"; it is not modified. Raises CheckpointError if there
    is no such codec, or for an array of objects."""
    if array.ndim != 1 or array.dtype.hasobject:
        raise CheckpointError(f"{array.dtype}{list(array.shape)}: a chunk is 1-D, of plain numbers")
    if codec == "raw":
        return array.tobytes()
    if codec == "planes":
        return planes.encode(array)
    raise _unknown(codec)


def decode(codec: str, body: bytes | memoryview, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """`count` elements of `dtype`, 1-D; by "raw" they share the memory of `body`, as read-only as
    that is. Raises CheckpointError if `body` is not what `encode` made of such an array."""
    if codec == "raw":
        return _raw(body, dtype, count)
    array = np.empty(count, dtype)
    decode_into(codec, body, array)
    return array


def decode_into(codec: str, body: bytes | memoryview, out: NDArray[Any]) -> None:
    """The same into a 1-D contiguous array. Raises CheckpointError; `out` may be spoilt then."""
    if codec == "raw":
        out[...] = _raw(body, out.dtype, len(out))
    elif codec == "planes":
        planes.decode_into(body, out)
    else:
        raise _unknown(codec)


def _raw(body: bytes | memoryview, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    size = memoryview(body).nbytes
    if size != count * dtype.itemsize:
        raise torn(f"it has {size} bytes, not those of {count} elements of {dtype}")
    return np.frombuffer(body, dtype) if count else np.empty(0, dtype)


def _unknown(codec: str) -> CheckpointError:
    return CheckpointError(
        f"codec {codec!r} is none that this version knows; read it with the version that wrote it"
    )
