"""What a commit holds and where: indices of ranks, which lie in packs, and the record over them.

An index lists the pieces that one rank wrote and their chunks; a record holds the sha256 of each
index, an index the xxh3 of each chunk. So the sha256 of the record, its Merkle root, is one of all
bytes of the commit, and a list of commits is read without any index.

Index: {"packs": [digest, ...; "" is the pack that the index lies in],
        "groups": [{"of": [tensor, ...], "shape": [...], "dtype": "float32",
                    "pieces": [[box_offset, box_shape, start, stop, [chunk, ...]], ...]}, ...],
        "depth": commits to replay to have it}
Chunk: [pack, at, bytes, codec, count, xxh3 of the stored bytes, xxh3 of the elements]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import zstandard

from meshwright.checkpoint.holding import canonical
from meshwright.checkpoint.pieces import Piece, Shape

SAME, ADAMW, XOR = "same", "adamw", "xor"
RELATIVE = frozenset({SAME, ADAMW, XOR})  # codecs that need what the parent holds
Key = tuple[str, Shape, Shape, Shape, int, int]
PARAMETER, FIRST_MOMENT, SECOND_MOMENT = "param/", "adamw.m/", "adamw.v/"


@dataclass(frozen=True)
class Chunk:
    """`count` elements of a piece (of each of the pieces that it is of), stored as `bytes` bytes
    from `at` in the pack `pack`. `raw` is the xxh3 of the elements themselves, of all pieces one
    after another. One of codec "same" is the parent's chunk, and has no bytes."""

    pack: str
    at: int
    bytes: int
    codec: str
    count: int
    xxh3: str
    raw: str

    @property
    def relative(self) -> bool:
        """Whether it needs the chunk of the parent."""
        return self.codec in RELATIVE


@dataclass(frozen=True)
class Stored:
    """Pieces of the same geometry, one of each tensor of `of`, whose chunks hold them together.
    `shape`, box and range as in Piece."""

    of: tuple[str, ...]
    dtype: str
    piece: Piece  # that of the first tensor
    chunks: tuple[Chunk, ...]

    def cut(self, position: int) -> Piece:
        """The piece that is the chunk at `position`, of the first tensor."""
        before = sum(chunk.count for chunk in self.chunks[:position])
        return cut(self.piece, before, before + self.chunks[position].count)

    def cuts(self) -> Iterator[tuple[int, Piece]]:
        """Position and piece of each chunk."""
        at = 0
        for position, chunk in enumerate(self.chunks):
            yield position, cut(self.piece, at, at + chunk.count)
            at += chunk.count


@dataclass(frozen=True)
class Index:
    """What one rank wrote."""

    stored: tuple[Stored, ...]
    depth: int

    def rows(self, pieces: Sequence[Piece]) -> tuple[Stored, ...] | None:
        """The rows of chunks that hold just these pieces: one of all together, or one of each that
        is not relative to anything."""
        found = [self.by_key.get(key_of(piece.name, piece)) for piece in pieces]
        first = found[0]
        if first is not None and first.of == tuple(piece.name for piece in pieces):
            return (first,)
        alone = tuple(
            row
            for row in found
            if row and len(row.of) == 1 and not any(chunk.relative for chunk in row.chunks)
        )
        return alone if len(alone) == len(pieces) else None

    @cached_property
    def by_key(self) -> dict[Key, Stored]:
        """The row that holds a piece."""
        return {key_of(name, one.piece): one for one in self.stored for name in one.of}

    @property
    def packs(self) -> set[str]:
        """The packs that hold a chunk of it."""
        return {chunk.pack for one in self.stored for chunk in one.chunks if chunk.bytes}


@dataclass(frozen=True)
class IndexRef:
    """Where the index of a rank lies, and what it must be."""

    pack: str
    at: int
    bytes: int
    xxh3: str
    sha256: str
    stored_bytes: int  # that the rank wrote for it, without what was there before

    def to_json(self) -> list[Any]:
        """As it stands in a part and in a record."""
        return [self.pack, self.at, self.bytes, self.xxh3, self.sha256, self.stored_bytes]


def key_of(name: str, piece: Piece) -> Key:
    """What tells the piece of tensor `name` with that geometry from all others."""
    return name, piece.global_shape, piece.box_offset, piece.box_shape, piece.start, piece.stop


def may_share(a: Piece, b: Piece) -> bool:
    """False if pieces of one tensor have no element in common; quickly."""
    if (a.box_offset, a.box_shape) == (b.box_offset, b.box_shape):
        return a.start < b.stop and b.start < a.stop
    return all(
        ao < bo + bn and bo < ao + an
        for ao, an, bo, bn in zip(a.box_offset, a.box_shape, b.box_offset, b.box_shape, strict=True)
    )


def cut(piece: Piece, first: int, last: int) -> Piece:
    """Elements [first, last) of a piece, which are a piece themselves."""
    start = piece.start
    return Piece(
        piece.name,
        piece.global_shape,
        piece.box_offset,
        piece.box_shape,
        start + first,
        start + last,
    )


def renamed(piece: Piece, name: str) -> Piece:
    """The same elements of another tensor."""
    return Piece(
        name, piece.global_shape, piece.box_offset, piece.box_shape, piece.start, piece.stop
    )


def piece_to_json(piece: Piece) -> list[Any]:
    """A piece without its tensor's name and shape."""
    return [list(piece.box_offset), list(piece.box_shape), piece.start, piece.stop]


def piece_from_json(name: str, shape: Shape, raw: list[Any]) -> Piece:
    """Inverse of `piece_to_json`."""
    box_offset, box_shape, start, stop = raw
    return Piece(name, shape, tuple(box_offset), tuple(box_shape), start, stop)


def dump_index(index: Index, names: Mapping[str, str]) -> tuple[bytes, str]:
    """An index as bytes, and its sha256. `names` gives the digests of packs that chunks name
    otherwise, and "" for the pack that the index will lie in."""
    packs: dict[str, int] = {}
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for one in index.stored:
        chunks = [_chunk_to_json(chunk, packs, names) for chunk in one.chunks]
        key = (one.of, one.piece.global_shape, one.dtype)
        groups.setdefault(key, []).append([*piece_to_json(one.piece), chunks])
    plain = canonical(
        {
            "packs": list(packs),
            "groups": [
                {"of": of, "shape": shape, "dtype": dtype, "pieces": pieces}
                for (of, shape, dtype), pieces in groups.items()
            ],
            "depth": index.depth,
        }
    )
    return zstandard.ZstdCompressor(level=1).compress(plain), sha256(plain).hexdigest()


def load_index(body: bytes, ref: IndexRef) -> Index:
    """Inverse of `dump_index`. Raises ValueError if it is not what was written."""
    try:
        plain = zstandard.ZstdDecompressor().decompress(body)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if sha256(plain).hexdigest() != ref.sha256:
        raise ValueError("its hash differs")
    raw = json.loads(plain)
    packs = [digest or ref.pack for digest in raw["packs"]]
    stored = tuple(
        Stored(
            tuple(group["of"]),
            group["dtype"],
            piece_from_json(group["of"][0], tuple(group["shape"]), piece),
            tuple(_chunk_from_json(chunk, packs) for chunk in chunks),
        )
        for group in raw["groups"]
        for *piece, chunks in group["pieces"]
    )
    return Index(stored, raw["depth"])


def _chunk_to_json(chunk: Chunk, packs: dict[str, int], names: Mapping[str, str]) -> list[Any]:
    pack = names.get(chunk.pack, chunk.pack)
    where = packs.setdefault(pack, len(packs)) if chunk.bytes else -1
    raw = [] if chunk.raw == chunk.xxh3 else [chunk.raw]
    return [where, chunk.at, chunk.bytes, chunk.codec, chunk.count, chunk.xxh3, *raw]


def _chunk_from_json(raw: list[Any], packs: list[str]) -> Chunk:
    where, at, size, codec, count, xxh3, *of_elements = raw
    elements = of_elements[0] if of_elements else xxh3
    return Chunk(packs[where] if size else "", at, size, codec, count, xxh3, elements)
