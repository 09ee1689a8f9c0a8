"""Copies of a rank's state in memory that is taken once and used again, under a cap of bytes.

Training goes on as soon as the copy is made. Memory that is used for the first time costs three
times a copy, so the buffers stay. A state larger than the cap is copied by turns, as what was
copied before has been written; training waits that long.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping
from dataclasses import replace
from queue import SimpleQueue
from threading import Condition
from typing import Any, Protocol

import numpy as np

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.chunks import Array
from meshwright.checkpoint.pieces import Piece

_TURNS = 4


class Source(Protocol):
    """Where elements of a piece can be had now: memory that the next step changes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements."""

    def copy_to(self, out: Array, start: int) -> None:
        """Fill the 1-D `out` with its elements from `start` on."""


def nbytes(sources: Mapping[Piece, Source]) -> int:
    """Bytes of a copy of it all."""
    return sum(piece.size * source.dtype.itemsize for piece, source in sources.items())


class Buffers:
    """A copy of a whole state; the next one goes into the same memory."""

    def __init__(self) -> None:
        self._of: dict[Piece, Array] = {}

    def take(self, sources: Mapping[Piece, Source]) -> dict[Piece, Array]:
        """Copy `sources` now. What was taken before is gone."""
        copy = self.reserve(sources)
        fill(copy, sources)
        return copy

    def reserve(self, sources: Mapping[Piece, Source]) -> dict[Piece, Array]:
        """Room for a copy of `sources`, for `fill`. What was taken before is gone."""
        kept, self._of = self._of, {}
        for piece, source in sources.items():
            buffer = kept.get(piece)
            if buffer is None or buffer.dtype != source.dtype:
                buffer = np.empty(piece.size, source.dtype)
            self._of[piece] = buffer
        return self._of


def fill(copy: Mapping[Piece, Array], sources: Mapping[Piece, Source]) -> None:
    """Copy `sources` into the room for them."""
    for piece, buffer in copy.items():
        sources[piece].copy_to(buffer, 0)


class InTurn(Mapping[Piece, Array]):
    """Pieces whose elements are there one after another, and once: `items` alone can be asked."""

    def __init__(self, items: Iterable[tuple[Piece, Array]]) -> None:
        self._items = items

    def items(self) -> ItemsView[Piece, Array]:
        """Each with its elements, which are let go when the next is taken."""
        return _Once(self, self._items)

    def __iter__(self) -> Iterator[Piece]:
        raise TypeError("pieces that come in turn can be taken by items() only")

    def __len__(self) -> int:
        raise TypeError("pieces that come in turn can be taken by items() only")

    def __getitem__(self, piece: Piece) -> Array:
        raise KeyError(piece)


class _Once(ItemsView[Piece, Array]):
    def __init__(self, of: InTurn, items: Iterable[tuple[Piece, Array]]) -> None:
        super().__init__(of)
        self._items = items

    def __iter__(self) -> Iterator[tuple[Piece, Array]]:
        return iter(self._items)


class Turns(InTurn):
    """A copy by turns: one thread fills, another takes the items, and no more than `cap_bytes` lie
    between them. Pieces larger than a quarter of the cap come as several."""

    def __init__(self, sources: Mapping[Piece, Source], cap_bytes: int) -> None:
        super().__init__(self._take())
        largest = max((source.dtype.itemsize for source in sources.values()), default=1)
        self._sources, self._most = sources, max(cap_bytes // _TURNS, largest)
        self._held, self._left = 0, False
        self._room = Condition()
        self._filled: SimpleQueue[tuple[Piece, Array] | BaseException] = SimpleQueue()
        self._parts = {
            part: piece
            for piece, source in sources.items()
            for part in _parts(piece, self._most // source.dtype.itemsize)
        }

    def fill(self) -> None:
        """Copy it all, waiting for room; returns early if the other side has left. What a source
        raises is raised on both sides."""
        try:
            self._fill()
        except BaseException as error:
            self._filled.put(error)
            raise

    def leave(self) -> None:
        """Nothing more will be taken."""
        with self._room:
            self._left = True
            self._room.notify()

    def _fill(self) -> None:
        for part, piece in self._parts.items():
            source = self._sources[piece]
            size = part.size * source.dtype.itemsize
            with self._room:
                self._room.wait_for(lambda size=size: self._has_room(size))  # type: ignore[misc]
                if self._left:
                    return
                self._held += size
            buffer = np.empty(part.size, source.dtype)
            source.copy_to(buffer, part.start - piece.start)
            self._filled.put((part, buffer))
            del buffer  # it is the other side's now

    def _take(self) -> Iterator[tuple[Piece, Array]]:
        # Who takes still has the item before in its hands when it asks for the next.
        before = 0
        for _ in self._parts:
            item = self._filled.get()
            if isinstance(item, BaseException):
                raise CheckpointError(f"the state could not be copied ({item})") from item
            self._give_back(before)
            before = item[1].nbytes
            yield item
            del item

    def _has_room(self, size: int) -> bool:
        # A part that was given back may be held by a chunk that waits for its pack to be full.
        return self._left or self._held + size <= (_TURNS - 1) * self._most

    def _give_back(self, size: int) -> None:
        with self._room:
            self._held -= size
            self._room.notify()


def _parts(piece: Piece, most: int) -> Iterator[Piece]:
    """A piece as ranges of at most `most` elements."""
    if piece.size <= most:
        yield piece
        return
    for start in range(piece.start, piece.stop, most):
        yield replace(piece, start=start, stop=min(start + most, piece.stop))
