"""The bytes of an encoded chunk: a header, then stretches that a cursor hands out, checked."""

from __future__ import annotations

import struct
from typing import Any

from meshwright.base.errors import CheckpointError

_HEADER = struct.Struct("<4sBBHIQ")  # mark, codec, word bytes, flags, tile words, words
_MARK = b"MWc1"
_MOST_TILE_WORDS = 1 << 24


class Header:
    """What every body begins with. `codec` is one letter, sizes count words of `word_bytes`."""

    def __init__(self, codec: bytes, word_bytes: int, flags: int, tile: int, words: int) -> None:
        self.codec, self.word_bytes, self.flags = codec, word_bytes, flags
        self.tile, self.words = tile, words

    def pack(self) -> bytes:
        """As it stands in the body."""
        return _HEADER.pack(
            _MARK, ord(self.codec), self.word_bytes, self.flags, self.tile, self.words
        )


class Cursor:
    """Reads a body from its start. Raises CheckpointError where it ends too early."""

    def __init__(self, body: bytes | memoryview) -> None:
        self._view, self._at = memoryview(body).cast("B"), 0

    def take(self, size: int) -> memoryview:
        """The next `size` bytes; shares the memory of the body."""
        end = self._at + size
        if end > len(self._view):
            raise torn(f"it ends after {len(self._view)} bytes, inside what it announces")
        found = self._view[self._at : end]
        self._at = end
        return found

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        """The next fields."""
        return form.unpack(self.take(form.size))

    def header(self, codec: bytes, word_bytes: int, words: int) -> Header:
        """The header, which must be of `codec` and of that many words."""
        mark, found, size, flags, tile, count = self.unpack(_HEADER)
        if mark != _MARK or found != ord(codec):
            raise torn(f"it does not begin as one of codec {codec.decode()!r}")
        if (size, count) != (word_bytes, words):
            raise torn(f"it holds {count} words of {size} bytes, not {words} of {word_bytes}")
        if not 0 < tile <= _MOST_TILE_WORDS:
            raise torn(f"its tiles are of {tile} words")
        return Header(codec, size, flags, tile, count)

    def end(self) -> None:
        """Nothing may follow."""
        if rest := len(self._view) - self._at:
            raise torn(f"{rest} bytes follow its end")


def torn(why: str) -> CheckpointError:
    """The error of a body that cannot be decoded."""
    return CheckpointError(
        f"an encoded chunk is torn or foreign: {why}; read an earlier commit, or another replica"
    )
