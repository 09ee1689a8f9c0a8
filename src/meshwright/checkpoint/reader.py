"""Reading a commit under any layout, the one it was written under or another."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.base.errors import CheckpointError, did_you_mean
from meshwright.checkpoint import codec as codecs
from meshwright.checkpoint.chunks import Array, bytes_of, chunk_bound, dtype_of
from meshwright.checkpoint.codec import Moments
from meshwright.checkpoint.commits import Commit, CommitRecord, Place
from meshwright.checkpoint.holding import Holding
from meshwright.checkpoint.pieces import Piece, Shape, transfers
from meshwright.checkpoint.record import (
    ADAMW,
    SAME,
    Chunk,
    Index,
    IndexRef,
    Key,
    Stored,
    key_of,
    may_share,
    renamed,
)
from meshwright.checkpoint.spread import spread
from meshwright.checkpoint.stored import (
    DamagedCommitError,
    read_index,
    read_indices,
    read_stored,
)

_AT_ONCE = 4
_FEW_RANKS = 64
_FEW_BYTES = 1 << 20  # less is sooner read than threads are started


class Reader:
    """The tensors of one commit. Every byte is checked when it is read.

    Raises DamagedCommitError if what is read is not what was written.
    """

    def __init__(
        self, holding: Holding, record: CommitRecord, open_parent: Callable[[Place], Reader]
    ) -> None:
        self._holding, self._record, self._open_parent = holding, record, open_parent
        self._own: dict[int, Index] = {}

    @property
    def holding(self) -> Holding:
        """The store that is read from."""
        return self._holding

    @property
    def commit(self) -> Commit:
        """The commit that is read."""
        return self._record.commit

    @property
    def step(self) -> int:
        """The committed step."""
        return self.commit.step

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the writer gave to `commit`."""
        return self._record.meta

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return list(self._by_name)

    def shape(self, name: str) -> Shape:
        """Global shape of a tensor. Raises CheckpointError if there is none of that name."""
        return self.stored(name)[0].piece.global_shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Dtype of a tensor. Raises CheckpointError if there is none of that name."""
        return dtype_of(self.stored(name)[0].dtype)

    def read(self, name: str) -> Array:
        """A whole tensor in its global shape. Raises CheckpointError."""
        shape = self.shape(name)
        return self.read_piece(Piece.whole(name, shape)).reshape(shape)

    def read_piece(self, piece: Piece) -> Array:
        """The elements of `piece`, a piece of any layout, 1-D. Reads only chunks that hold some of
        them. Raises CheckpointError if the name is absent or the global shape differs."""
        data = np.empty(piece.size, self.dtype(piece.name))
        self.fill({piece: data})
        return data

    def fill(self, wanted: Mapping[Piece, Array]) -> None:
        """Read many pieces into 1-D contiguous arrays of their dtype. Each chunk is read once, and
        of chunks a few at a time are held. Raises CheckpointError."""
        by_name: dict[str, list[tuple[Piece, Array]]] = {}
        for piece, into in wanted.items():
            self._check(piece, into)
            by_name.setdefault(piece.name, []).append((piece, into))
        tasks = [(row, *cut) for row in self._rows_for(by_name) for cut in row.cuts()]

        def fill_from(task: tuple[Stored, int, Piece]) -> int:
            return self._fill_from(*task, by_name)

        many = sum(into.nbytes for into in wanted.values()) > _FEW_BYTES
        at_once = min(_AT_ONCE, os.cpu_count() or 1) if many else 1
        filled = sum(spread(fill_from, tasks, at_once))
        if filled != sum(piece.size for piece in wanted):
            raise CheckpointError(f"{self.commit}: does not hold all elements that it says it does")

    def stored(self, name: str) -> list[Stored]:
        """Where a tensor lies. Raises CheckpointError if there is none of that name."""
        try:
            return self._by_name[name]
        except KeyError:
            hint = did_you_mean(name, self.names) or "; set [model] to what it was trained with"
            raise CheckpointError(f"{self.commit}: no tensor {name!r}" + hint) from None

    def rows(self, pieces: Sequence[Piece]) -> tuple[Stored, ...] | None:
        """The rows of chunks that hold just these pieces, see `Index.rows`."""
        home = self._homes.get(key_of(pieces[0].name, pieces[0]))
        return home.rows(pieces) if home else None

    def goes_on_from(self, row: Stored, number: int) -> bool:
        """Whether a chunk here is relative to that of the same elements in `row`, the parent's."""
        key = key_of(row.of[0], row.piece)
        home = self._homes.get(key)
        chunks = home.by_key[key].chunks if home else ()
        return number < len(chunks) and chunks[number].relative

    def rows_for(self, rank: int) -> Callable[[Sequence[Piece]], tuple[Stored, ...] | None]:
        """`rows`, for pieces that rank `rank` probably wrote: what others wrote is looked at only
        if it did not, and if they are not too many."""

        def found(pieces: Sequence[Piece]) -> tuple[Stored, ...] | None:
            own = self._index(rank).rows(pieces) if rank < self.commit.ranks else None
            return own or (self.rows(pieces) if self.commit.ranks <= _FEW_RANKS else None)

        return found

    @property
    def refs(self) -> tuple[IndexRef, ...]:
        """Where the index of each rank lies."""
        return self._record.indices

    @cached_property
    def indices(self) -> tuple[Index, ...]:
        """What each rank wrote."""
        return read_indices(self._holding, self.commit.attempt, self._record.indices)

    def _index(self, rank: int) -> Index:
        if rank not in self._own:
            ref = self._record.indices[rank]
            self._own[rank] = read_index(self._holding, self.commit.attempt, rank, ref)
        return self._own[rank]

    @cached_property
    def _by_name(self) -> dict[str, list[Stored]]:
        found: dict[str, list[Stored]] = {}
        for index in self.indices:
            for one in index.stored:
                for name in one.of:
                    found.setdefault(name, []).append(one)
        return dict(sorted(found.items()))

    @cached_property
    def _homes(self) -> dict[Key, Index]:
        return {key: index for index in self.indices for key in index.by_key}

    @cached_property
    def parent(self) -> Reader:
        """That of the parent, which chunks are relative to."""
        if self._record.parent is None:
            raise CheckpointError(f"{self.commit}: is relative to a commit that it does not name")
        return self._open_parent(self._record.parent)

    def _check(self, piece: Piece, into: Array) -> None:
        shape, dtype = self.shape(piece.name), self.dtype(piece.name)
        if shape != piece.global_shape:
            raise CheckpointError(
                f"{self.commit}: {piece.name} has shape {shape}, {piece.global_shape} was asked "
                "for; set [model] to what the commit was trained with"
            )
        if into.dtype != dtype or into.shape != (piece.size,) or not into.flags.c_contiguous:
            raise CheckpointError(
                f"{self.commit}: {piece.key} is {dtype} of shape ({piece.size},), to be read into "
                f"{into.dtype} of shape {into.shape}"
            )

    def _rows_for(self, wanted: Mapping[str, list[tuple[Piece, Array]]]) -> list[Stored]:
        """The rows that may hold some of it, each once, in the order that they are stored in."""
        found = {
            id(row): row
            for name, targets in wanted.items()
            for row in self.stored(name)
            if any(may_share(row.piece, piece) for piece, _ in targets)
        }
        return sorted(found.values(), key=lambda row: self._order[id(row)])

    @cached_property
    def _order(self) -> dict[int, int]:
        rows = (row for index in self.indices for row in index.stored)
        return {id(row): number for number, row in enumerate(rows)}

    def _fill_from(
        self, row: Stored, number: int, cut: Piece, wanted: Mapping[str, list[tuple[Piece, Array]]]
    ) -> int:
        """Read a chunk and copy what is wanted of it: the number of elements."""
        if (into := self._target(row, number, cut, wanted)) is not None:
            self._read(row, number, bytes_of(into))
            return cut.size
        ways = [
            (position, source, target.of(into[target.start : target.stop]))
            for position, name in enumerate(row.of)
            for piece, into in wanted.get(name, ())
            if may_share(cut, piece)
            for source, target in transfers(renamed(cut, name), piece)
        ]
        if not ways:
            return 0
        if (whole := _all_of(cut, [into for _, _, into in ways])) is not None:
            chunk = row.chunks[number]
            if not chunk.relative:
                codecs.decode_into(chunk.codec, self._open(row, number, cut), whole)
                return cut.size
        held = self.elements(row, number, cut)
        for position, source, into in ways:
            into[...] = source.of(held[position][source.start : source.stop])
        return sum(into.size for _, _, into in ways)

    def _target(
        self, row: Stored, number: int, cut: Piece, wanted: Mapping[str, list[tuple[Piece, Array]]]
    ) -> Array | None:
        """Where a chunk can be read to as it is stored, if it can."""
        if row.chunks[number].codec != "raw" or self._holding.sealed:
            return None
        found = [(p, into) for p, into in wanted.get(cut.name, ()) if may_share(cut, p)]
        if len(found) != 1:
            return None
        piece, into = found[0]
        alike = (piece.box_offset, piece.box_shape) == (cut.box_offset, cut.box_shape)
        if not alike or cut.start < piece.start or piece.stop < cut.stop:
            return None
        return into[cut.start - piece.start : cut.stop - piece.start]

    def elements(self, row: Stored, number: int, cut: Piece) -> tuple[Array, ...]:
        """The elements of a chunk, for each tensor of the row: the chain back to what is full, and
        from there on forward. Raises CheckpointError."""
        chain, reader, base = [(self, row)], self, row
        while base.chunks[number].relative:
            reader = reader.parent
            rows = reader.rows(tuple(renamed(row.piece, name) for name in row.of))
            if rows is None or any(len(one.chunks) != len(row.chunks) for one in rows):
                raise CheckpointError(f"{self.commit}: {cut.key} is not in {reader.commit}")
            if len(rows) > 1 or not rows[0].chunks[number].relative:
                held = tuple(reader._full(one, number, renamed(cut, one.of[0])) for one in rows)
                break
            base = rows[0]
            chain.append((reader, base))
        else:
            return (self._full(row, number, cut),)
        for reader, one in reversed(chain):
            held = reader._forward(one, number, cut, held)
        return held

    def _full(self, row: Stored, number: int, cut: Piece) -> Array:
        chunk = row.chunks[number]
        body = self._open(row, number, cut)
        return codecs.decode(chunk.codec, body, dtype_of(row.dtype), chunk.count)

    def _forward(
        self, row: Stored, number: int, cut: Piece, before: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        chunk = row.chunks[number]
        if chunk.codec == SAME:
            return before
        body = self._open(row, number, cut)
        try:
            return _led_to(chunk.codec, body, before)
        except CheckpointError as error:  # codecs of changes check what comes out
            raise self._damage(row, number, chunk, str(error)) from error

    def _open(self, row: Stored, number: int, cut: Piece) -> bytes | memoryview:
        chunk = row.chunks[number]
        closed = self._read(row, number)
        bound = chunk_bound(row.of, cut, row.dtype, chunk.codec)
        return memoryview(self._holding.open(closed, *bound))

    def _read(self, row: Stored, number: int, into: memoryview | None = None) -> bytes | memoryview:
        c = row.chunks[number]
        return read_stored(self._holding, c.pack, c.at, c.bytes, c.xxh3, row.of[0], number, into)

    def _damage(self, row: Stored, number: int, chunk: Chunk, why: str) -> DamagedCommitError:
        start, stop = chunk.at, chunk.at + chunk.bytes
        return DamagedCommitError(str(self.commit), row.of[0], number, chunk.pack, start, stop, why)


def _all_of(cut: Piece, targets: list[Array]) -> Array | None:
    """The memory that takes the elements of a chunk as they lie in it, if there is such."""
    if len(targets) == 1 and targets[0].size == cut.size and targets[0].flags.c_contiguous:
        return targets[0].reshape(-1)
    return None


def _led_to(codec: str, body: bytes | memoryview, before: tuple[Array, ...]) -> tuple[Array, ...]:
    """What a change made of `before`, in its memory if that can be."""
    if codec != ADAMW:
        return (codecs.decode_change(body, before[0]),)
    base = Moments(*before)
    into = base if all(array.flags.writeable for array in before) else None
    found = codecs.decode_update(body, base, into)
    return found.weight, found.m, found.v
