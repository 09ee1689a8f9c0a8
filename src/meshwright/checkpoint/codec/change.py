"""Codec "xor": what any array changed by since the step before, as planes.

The integer difference of the bit patterns takes 3 to 5 % less than their exclusive or on the state
of a trained model: neighbours across a carry stay near.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.codec.body import Cursor, Header, torn
from meshwright.checkpoint.codec.planes import TILE_WORDS, PlaneReader, PlaneWriter, as_words
from meshwright.checkpoint.codec.residual import add_residual, to_residual

_DIGEST = struct.Struct("<Q")


def encode_change(new: NDArray[Any], old: NDArray[Any]) -> bytes:
    """What `decode_change` needs to make `new` from `old`: 1-D, of one dtype and length.

    Neither is modified. Raises CheckpointError if they differ in dtype or shape.
    """
    if new.dtype != old.dtype or new.shape != old.shape or new.ndim != 1:
        raise CheckpointError(
            f"a change from {old.dtype}{list(old.shape)} to {new.dtype}{list(new.shape)}; "
            "write a full commit instead"
        )
    now, before = as_words(new), as_words(old)
    writer, digest = PlaneWriter(TILE_WORDS), xxhash.xxh3_64()
    writer.parts.append(Header(b"x", now.dtype.itemsize, 0, TILE_WORDS, len(now)).pack())
    out, scratch = np.empty((2, min(TILE_WORDS, len(now))), now.dtype)
    for start in range(0, len(now), TILE_WORDS):
        tile = now[start : start + TILE_WORDS]
        size = len(tile)
        base = before[start : start + TILE_WORDS]
        writer.put(to_residual(tile, base, out[:size], scratch[:size]))
        digest.update(tile.data)
    writer.parts.append(_DIGEST.pack(digest.intdigest()))
    return b"".join(writer.parts)


def decode_change(body: bytes | memoryview, old: NDArray[Any]) -> NDArray[Any]:
    """The array that `body` was made from; `old` is the one it was made against, not modified.

    Raises CheckpointError if `body` is torn or foreign, or was made against another array.
    """
    before = as_words(old)
    new = np.empty(len(old), old.dtype)
    words = as_words(new)
    cursor = Cursor(body)
    header = cursor.header(b"x", words.dtype.itemsize, len(words))
    reader, digest = PlaneReader(cursor), xxhash.xxh3_64()
    scratch = np.empty(min(header.tile, len(words)), words.dtype)
    for start in range(0, len(words), header.tile):
        tile = words[start : start + header.tile]
        base = before[start : start + header.tile]
        if reader.get(tile):
            add_residual(tile, base, scratch[: len(tile)])
        else:
            tile[...] = base
        digest.update(tile.data)
    if cursor.unpack(_DIGEST) != (digest.intdigest(),):
        raise torn("it does not follow from the step before as read, or was altered")
    cursor.end()
    return new
