"""Codec "planes": words split into byte planes, each kept in the form that takes least.

The bytes of equal place in all words of a tile make a plane. Of floating-point numbers one plane is
the exponents, which zstd halves or better; those of the low bits are noise and are kept as they
are. Differences of like numbers leave the upper planes zero.
"""

from __future__ import annotations

import struct
from math import gcd
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from meshwright.checkpoint.codec.body import Cursor, Header, torn

Words = NDArray[np.unsignedinteger[Any]]
Plane = NDArray[np.uint8]

TILE_WORDS = 1 << 16  # all arrays of a tile stay in a cache of 2 MiB
_PLANE = struct.Struct("<BI")  # form, bytes that follow
_ZERO, _RAW, _ZSTD, _NIBBLES = range(4)
_SAMPLES, _SAMPLE_BYTES = 8, 512
_WORTH = 0.97  # a plane of which zstd leaves more is kept as it is
_ROTATED = 1  # flag: the sign, which is noise, was moved from the exponent to the lowest bit


class PlaneWriter:
    """Takes tiles of words of one size and gathers their planes. For one thread."""

    def __init__(self, tile: int) -> None:
        self.parts: list[bytes] = []
        self._plane = np.zeros(tile + tile % 2, np.uint8)
        self._zstd = zstandard.ZstdCompressor(compression_params=_parameters())

    def put(self, words: Words) -> None:
        """Add a tile, C-contiguous; not modified, not kept."""
        size, high = words.dtype.itemsize, int(words.max())
        by_place = words.view(np.uint8).reshape(len(words), size)
        for place in range(size):
            if high >> (8 * place):
                plane = self._plane[: len(words)]
                lowest = words if not place else by_place[:, place]
                np.copyto(plane, lowest, casting="unsafe")
                self._put_plane(plane)
            else:
                self.parts.append(_PLANE.pack(_ZERO, 0))

    def _put_plane(self, plane: Plane) -> None:
        form, kept = self._smallest(plane)
        self.parts += (_PLANE.pack(form, len(kept)), kept)

    def _smallest(self, plane: Plane) -> tuple[int, bytes]:
        highest = int(plane.max())
        if not highest:
            return _ZERO, b""
        if highest < 16:
            return _NIBBLES, self._zstd.compress(self._nibbles(len(plane)))
        if self._compresses(plane):
            kept = self._zstd.compress(plane.data)
            if len(kept) < len(plane):
                return _ZSTD, kept
        return _RAW, plane.tobytes()

    def _compresses(self, plane: Plane) -> bool:
        """Whether a sample gets smaller: that costs a tenth of trying all of it."""
        if len(plane) < 4 * _SAMPLES * _SAMPLE_BYTES:
            return True
        rows = len(plane) // _SAMPLES
        picked = plane[: rows * _SAMPLES].reshape(_SAMPLES, rows)[:, :_SAMPLE_BYTES]
        sample = picked.tobytes()
        return len(self._zstd.compress(sample)) < _WORTH * len(sample)

    def _nibbles(self, size: int) -> memoryview:
        """Two neighbours of the current plane to a byte, on which zstd spends a bit at least."""
        pairs = self._plane[: size + size % 2].view("<u2")
        packed: Plane = (pairs | (pairs >> 4)).astype(np.uint8)
        return packed.data


class PlaneReader:
    """Puts the tiles that a PlaneWriter took back together. Raises CheckpointError."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._zstd = zstandard.ZstdDecompressor()

    def get(self, words: Words) -> bool:
        """Fill the next tile, C-contiguous; False, and it is not touched, if all of it is zero."""
        size = words.dtype.itemsize
        planes = [self._plane(len(words)) for _ in range(size)]
        if not any(plane is not None for plane in planes):
            return False
        if planes[0] is not None and not any(plane is not None for plane in planes[1:]):
            np.copyto(words, planes[0])
            return True
        by_place = words.view(np.uint8).reshape(len(words), size)
        for place, plane in enumerate(planes):
            by_place[:, place] = 0 if plane is None else plane
        return True

    def _plane(self, size: int) -> Plane | None:
        """The next plane, None if it is zero."""
        form, kept = self._cursor.unpack(_PLANE)
        data = self._cursor.take(kept)
        if form == _ZERO and not kept:
            return None
        if form == _RAW and kept == size:
            return np.frombuffer(data, np.uint8)
        if form == _ZSTD:
            return self._unzip(data, size)
        if form == _NIBBLES:
            packed = self._unzip(data, (size + 1) // 2).astype("<u2")
            apart: Plane = ((packed | (packed << 4)) & 0x0F0F).view(np.uint8)
            return apart[:size]
        raise torn(f"a plane of {size} bytes is kept in form {form} as {kept}")

    def _unzip(self, data: memoryview, size: int) -> Plane:
        try:
            announced = zstandard.frame_content_size(data)
            if announced != size:  # before memory is taken for it
                raise torn(f"a plane of {announced} bytes stands in place of one of {size}")
            return np.frombuffer(self._zstd.decompress(data, allow_extra_data=False), np.uint8)
        except zstandard.ZstdError as error:
            raise torn(str(error)) from error


def _parameters() -> zstandard.ZstdCompressionParameters:
    """Level 1 that hardly looks for repeats: in planes of exponents it finds some by chance, which
    cost time and bytes; what is gained is by Huffman's code."""
    return zstandard.ZstdCompressionParameters.from_level(
        1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6
    )


def as_words(array: NDArray[Any]) -> Words:
    """The elements as unsigned words of 1, 2, 4 or 8 bytes; shares the memory of a contiguous
    array."""
    size = gcd(array.dtype.itemsize, 8)
    words: Words = np.ascontiguousarray(array).view(f"<u{size}")
    return words


def encode(array: NDArray[Any]) -> bytes:
    """A 1-D array of any dtype without objects. Not modified."""
    words = as_words(array)
    bits = 8 * words.dtype.itemsize
    # Two bytes are bfloat16 for the most part, whose exponent then fills one: 1 to 3 % less. Of
    # float32 it would be less than 1 %, for a fifth of the time to decode.
    rotate = bits == 16
    writer = PlaneWriter(TILE_WORDS)
    size = words.dtype.itemsize
    header = Header(b"p", size, _ROTATED if rotate else 0, TILE_WORDS, len(words))
    writer.parts.append(header.pack())
    turned, carry = np.empty((2, min(TILE_WORDS, len(words))), words.dtype)
    for start in range(0, len(words), TILE_WORDS):
        tile = words[start : start + TILE_WORDS]
        if rotate:
            out, top = turned[: len(tile)], carry[: len(tile)]
            np.left_shift(tile, 1, out=out)
            np.right_shift(tile, bits - 1, out=top)
            tile = np.bitwise_or(out, top, out=out)
        writer.put(tile)
    return b"".join(writer.parts)


def decode_into(body: bytes | memoryview, array: NDArray[Any]) -> None:
    """Fill a contiguous array. Raises CheckpointError if `body` is not such an array's."""
    words = as_words(array)
    bits = 8 * words.dtype.itemsize
    cursor = Cursor(body)
    header = cursor.header(b"p", words.dtype.itemsize, len(words))
    reader = PlaneReader(cursor)
    carry = np.empty(min(header.tile, len(words)), words.dtype)
    for start in range(0, len(words), header.tile):
        tile = words[start : start + header.tile]
        if not reader.get(tile):
            tile[...] = 0
        elif header.flags & _ROTATED:
            low = np.left_shift(tile, bits - 1, out=carry[: len(tile)])
            np.right_shift(tile, 1, out=tile)
            np.bitwise_or(tile, low, out=tile)
    cursor.end()
