"""What one rank does for a commit: chunk by chunk into packs, then its part, which says where."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint import codec as codecs
from meshwright.checkpoint.chunks import Array, chunk_bound, digest, encoded
from meshwright.checkpoint.codec import Moments, Update
from meshwright.checkpoint.files import Body, hasty
from meshwright.checkpoint.holding import DamagedRecordError, Holding
from meshwright.checkpoint.packs import PACK_BYTES, PackWriter, xxh3
from meshwright.checkpoint.parts import (
    Attempt,
    Part,
    check_name,
    index_bound,
    part_name,
    publish_part,
    read_part,
)
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.record import (
    ADAMW,
    FIRST_MOMENT,
    PARAMETER,
    SAME,
    SECOND_MOMENT,
    XOR,
    Chunk,
    Index,
    IndexRef,
    Stored,
    cut,
    dump_index,
    renamed,
)
from meshwright.checkpoint.stored import DamagedCommitError, read_index

CHUNK_BYTES = 8 << 20
Row = tuple[Stored, ...]
Parent = Callable[[Sequence[Piece]], Row | None]
"""The rows of the parent that hold just these pieces: one for all, or one for each."""


@dataclass(frozen=True)
class Encoding:
    """How elements are stored. `codec`: "raw" or "planes". `chunk_bytes`: of elements in a chunk.
    `pack_bytes`: of a pack, which is what a rank holds at a time; twice that while it is sent.

    `update` makes a commit relative to its parent: it gives the update of AdamW that led to the
    elements of a parameter's piece, or None for what was not made by one. `durable`: wait until all
    is on disk; without, what a power failure tears is found out when it is read.
    """

    codec: str = "raw"
    chunk_bytes: int = CHUNK_BYTES
    update: Callable[[Piece], Update | None] | None = None
    durable: bool = True
    pack_bytes: int = PACK_BYTES


@dataclass(frozen=True)
class PartWritten:
    """What a rank wrote: bytes of elements, bytes stored for them, and the time it took."""

    bytes_raw: int
    bytes_stored: int
    seconds: float


@dataclass(frozen=True)
class _Together:
    """Pieces that are stored together, with their elements now and in the parent."""

    pieces: tuple[Piece, ...]
    arrays: tuple[Array, ...]
    bases: tuple[Array, ...] = ()
    update: Update | None = None


def write_part(
    holding: Holding,
    attempt: Attempt,
    rank: int,
    tensors: Mapping[Piece, Array],
    encoding: Encoding,
    base: Mapping[Piece, Array] | None = None,
    parent: Parent = lambda _: None,
    parent_depth: int = 0,
) -> PartWritten:
    """Write what `rank` holds: 1-D arrays of `piece.size`, which must not change meanwhile. Holds
    a pack of bytes beside them, no copy of them; they are asked for one after another, and once if
    there is no update. A part that is there already stays, if it can be read. Raises
    CheckpointError; the part is not seen then.
    """
    start = time.perf_counter()
    _check(attempt, rank, tensors, base or {})
    hurried = replace(holding, files=holding.files if encoding.durable else hasty(holding.files))
    writer = _Writer(hurried, encoding, parent)
    groups = _grouped(tensors, base or {}, encoding.update)
    written = [one for group in groups for one in writer.store(group)]
    depth = parent_depth + 1 if any(c.relative for one in written for c in one.chunks) else 0
    index = writer.finish(attempt, rank, Index(tuple(written), depth))
    found = sorted(writer.reused.union(writer.packs.found))
    _publish(hurried, Part(attempt, rank, depth, index, tuple(found)))
    return PartWritten(writer.raw_bytes, writer.packs.written_bytes, time.perf_counter() - start)


def _publish(holding: Holding, part: Part) -> None:
    """Say that the rank has written. Who took the place of a rank that died does not know that it
    had: what that wrote is as good, though chunks are sealed anew, or taken from elsewhere."""
    if publish_part(holding, part):
        return
    name = part_name(part.attempt, part.rank)
    try:
        there = read_part(holding, name)
        read_index(holding, there.attempt.name, there.rank, there.index)
    except (DamagedRecordError, DamagedCommitError):
        holding.files.remove(name)
        publish_part(holding, part)
        return
    if there.attempt.step != part.attempt.step:
        raise CheckpointError(
            f"{holding.address}/{name}: rank {part.rank} has written step {there.attempt.step} for "
            "this attempt before; give each try a name of its own"
        )


class _Writer:
    """The packs of one part. Chunks name their pack by number until it is finished."""

    def __init__(self, holding: Holding, encoding: Encoding, parent: Parent) -> None:
        self.holding, self.encoding, self.parent = holding, encoding, parent
        self.packs = PackWriter(holding.files, encoding.pack_bytes)
        self.raw_bytes = 0
        self.reused: set[str] = set()  # packs of the parent

    def store(self, group: _Together) -> list[Stored]:
        """Write the chunks of some pieces, but those that the parent has."""
        for piece, array in zip(group.pieces, group.arrays, strict=True):
            _check_array(piece, array)
        before = self._before(group)
        if len(group.pieces) > 1 and before is None:
            apart = zip(group.pieces, group.arrays, strict=True)
            return [one for p, a in apart for one in self.store(_Together((p,), (a,)))]
        self.raw_bytes += sum(array.nbytes for array in group.arrays)
        first, of = group.pieces[0], tuple(piece.name for piece in group.pieces)
        dtype, size = group.arrays[0].dtype.name, self._chunk_size(group)
        chunks = []
        for position, low in enumerate(range(0, first.size, size)):
            high = min(low + size, first.size)
            part = _Together(
                (cut(first, low, high),),
                tuple(np.ascontiguousarray(array[low:high]) for array in group.arrays),
                tuple(np.ascontiguousarray(array[low:high]) for array in group.bases),
                group.update,
            )
            old = [row.chunks[position] for row in before or ()]
            chunks.append(self._chunk(of, dtype, part, old))
        return [Stored(of, dtype, first, tuple(chunks))]

    def finish(self, attempt: Attempt, rank: int, index: Index) -> IndexRef:
        """Write the index behind the last chunks, and what is left."""
        names = {str(number): name for number, name in enumerate(self.packs.digests)}
        body, sha256 = dump_index(index, {**names, str(len(names)): ""})
        closed = self.holding.close(body, *index_bound(attempt.name, rank))
        at = self.packs.add_last(closed)
        pack, written = self.packs.digests[-1], self.packs.written_bytes
        return IndexRef(pack, at, len(closed), xxh3(closed), sha256, written)

    def _chunk_size(self, group: _Together) -> int:
        return max(1, self.encoding.chunk_bytes // group.arrays[0].itemsize)

    def _before(self, group: _Together) -> Row | None:
        """The parent's rows for these pieces, if they are cut alike."""
        rows = self.parent(group.pieces)
        size, whole = self._chunk_size(group), group.pieces[0].size
        counts = [min(size, whole - low) for low in range(0, whole, size)]
        alike = rows is not None and all(
            [chunk.count for chunk in row.chunks] == counts
            and row.dtype == group.arrays[0].dtype.name
            for row in rows
        )
        return rows if alike else None

    def _chunk(
        self, of: tuple[str, ...], dtype: str, part: _Together, old: Sequence[Chunk]
    ) -> Chunk:
        piece, raw = part.pieces[0], digest(part.arrays)
        alone = len(of) == 1
        if alone and old and not old[0].relative and old[0].raw == raw:
            self.reused.add(old[0].pack)
            return old[0]
        if old and part.bases:
            self._check_base(piece, part.bases, old)
            if raw == (old[0].raw if len(old) == 1 else digest(part.bases)):
                return Chunk("", 0, 0, SAME, piece.size, "", raw)
            if part.update is not None:
                new, base = Moments(*part.arrays), Moments(*part.bases)
                body = codecs.encode_update(new, base, part.update)
                return self._put(of, piece, dtype, ADAMW, body, raw)
            if alone:
                body = codecs.encode_change(part.arrays[0], part.bases[0])
                return self._put(of, piece, dtype, XOR, body, raw)
        codec = self.encoding.codec
        return self._put(of, piece, dtype, codec, encoded(codec, part.arrays[0]), raw)

    def _check_base(self, piece: Piece, bases: Sequence[Array], old: Sequence[Chunk]) -> None:
        """A wrong base would be found out only when somebody reads the commit."""
        if len(old) == 1:
            alike = old[0].raw == digest(bases)
        else:
            alike = all(one.raw == digest([base]) for one, base in zip(old, bases, strict=True))
        if not alike:
            raise CheckpointError(
                f"{piece.key}: the base is not what the parent commit holds; write a full commit"
            )

    def _put(
        self, of: tuple[str, ...], piece: Piece, dtype: str, codec: str, body: Body, raw: str
    ) -> Chunk:
        closed = self.holding.close(body, *chunk_bound(of, piece, dtype, codec))
        hashed = raw if closed is body and codec == "raw" else xxh3(closed)
        pack, at = self.packs.add(closed)
        return Chunk(str(pack), at, len(closed), codec, piece.size, hashed, raw)


def _grouped(
    tensors: Mapping[Piece, Array],
    base: Mapping[Piece, Array],
    update_of: Callable[[Piece], Update | None] | None,
) -> Iterator[_Together]:
    """Which pieces are stored together: parameter and moments, if an update of AdamW made them."""
    taken: set[Piece] = set()
    for piece in tensors if update_of else ():
        together = _with_moments(piece)
        fits = bool(together) and all(_is_float32(p, tensors, base) for p in together)
        update = update_of(piece) if update_of and fits else None
        if update is not None:
            taken.update(together)
            arrays, bases = (tuple(of[p] for p in together) for of in (tensors, base))
            yield _Together(together, arrays, bases, update)
    for piece, array in tensors.items():
        if piece not in taken:
            bases = (base[piece],) if update_of and piece in base else ()
            yield _Together((piece,), (array,), bases)


def _is_float32(piece: Piece, *states: Mapping[Piece, Array]) -> bool:
    return all(piece in state and state[piece].dtype == np.float32 for state in states)


def _with_moments(piece: Piece) -> tuple[Piece, ...]:
    if not piece.name.startswith(PARAMETER):
        return ()
    name = piece.name.removeprefix(PARAMETER)
    return piece, renamed(piece, FIRST_MOMENT + name), renamed(piece, SECOND_MOMENT + name)


def _check(
    attempt: Attempt, rank: int, tensors: Mapping[Piece, Array], base: Mapping[Piece, Array]
) -> None:
    check_name("attempt", attempt.name)
    if not 0 <= rank < attempt.ranks:
        raise CheckpointError(f"rank {rank}: there are {attempt.ranks} ranks, counted from 0")
    for piece, data in base.items():
        _check_array(piece, data)
        if piece in tensors and tensors[piece].dtype != data.dtype:
            raise CheckpointError(
                f"{piece.key}: is {tensors[piece].dtype}, its base {data.dtype}; "
                "write a full commit after a change of dtype"
            )


def _check_array(piece: Piece, data: Array) -> None:
    kind: np.dtype[Any] = data.dtype
    if data.shape != (piece.size,) or kind.hasobject or not kind.isnative or kind.kind in "SUMm":
        raise CheckpointError(
            f"{piece.key}: got {data.dtype} of shape {data.shape}; "
            f"a piece is numbers of shape ({piece.size},)"
        )
