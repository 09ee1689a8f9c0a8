"""Documents packed into rows of one length, best fit, as a pure function of the row's number.

The tokens of a store are cut into windows of `WINDOW_ROWS` rows. Inside a window whole documents go
to the row with the least room that takes them, longest first (best-fit decreasing, as in Ding et
al., Fewer Truncations Improve Language Modeling, 2024). What fits nowhere is cut to fill the holes,
so every window but the last is full to the token, and row r is in window r // WINDOW_ROWS: no index
over the corpus has to be built, kept or shared.

In a row only the last piece may be one that does not end its document. So the documents of a row
follow from its end-of-text tokens alone, which is how a trainer masks attention.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import DataError
from meshwright.data.store import TokenStore, as_plain, bring

Longs = npt.NDArray[np.int64]

WINDOW_ROWS = 64
PAD = -100  # a token that is none: no input, and no target that counts
_CHECKED = 1000  # documents
_KEPT_PLANS = 4096  # windows; about 10 kB each


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + length) of what is packed; `ends`: it ends its document."""

    start: int
    length: int
    ends: bool


Row = tuple[Piece, ...]


@dataclass(frozen=True)
class PackedBatch:
    """Rows as tokens, int64 [m, row], `PAD` where nothing is, and the document of each token in its
    row, counted from 0, int32 [m, row], -1 where nothing is."""

    tokens: Longs
    documents: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> PackedBatch:
        return PackedBatch(self.tokens[rows], self.documents[rows])

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """Where each document begins in the rows laid end to end, and their end, as kernels with
        variable lengths want it; padding counts as a document."""
        last = np.ones((len(self.documents), 1), dtype=bool)
        ends = np.concatenate([self.documents[:, 1:] != self.documents[:, :-1], last], axis=1)
        return np.concatenate([[0], np.flatnonzero(ends) + 1]).astype(np.int32)


class PackedRows:
    """A store as rows of `seq_len` + 1 tokens: inputs are all but the last, targets all but the
    first, and a target that begins a document counts for nothing. Every token is in one row."""

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        """`seq_len` >= 1."""
        self.store, self.seq_len, self.row = store, seq_len, seq_len + 1
        self._tokens = as_plain(store.tokens)
        self._rows = lru_cache(_KEPT_PLANS)(self._plan)

    def __len__(self) -> int:
        return -(-self.store.n_tokens // self.row)

    @property
    def in_memory(self) -> bool:
        """Whether reading is only copying."""
        return isinstance(self._tokens, np.ndarray)

    @property
    def efficiency(self) -> float:
        """Share of the places in all rows that hold a token."""
        return self.store.n_tokens / (len(self) * self.row)

    def pieces(self, row: int) -> Row:
        """What row number `row` holds, in order. Raises IndexError."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self._rows(row // WINDOW_ROWS)[row % WINDOW_ROWS]

    def spans(self, indices: Longs) -> list[tuple[int, int]]:
        """Where in the store the tokens of rows `indices` are, as [start, stop)."""
        pieces = (piece for row in indices.tolist() for piece in self.pieces(row))
        return [(piece.start, piece.start + piece.length) for piece in pieces]

    def read(self, indices: Longs) -> Longs:
        """Tokens of rows `indices` [m], int64 [m, seq_len + 1]."""
        if not self.in_memory:
            bring(self._tokens, self.spans(indices))
        out = np.full((len(indices), self.row), PAD, dtype=np.int64)
        for target, row in zip(out, indices, strict=True):
            at = 0
            for piece in self.pieces(int(row)):
                stop = piece.start + piece.length
                target[at : at + piece.length] = self._tokens[piece.start : stop]
                at += piece.length
        return out

    def documents(self, indices: Longs) -> npt.NDArray[np.int32]:
        """The document of each of their tokens, counted from 0 in each row, -1 where nothing is;
        int32 [m, seq_len + 1]."""
        documents = np.full((len(indices), self.row), -1, dtype=np.int32)
        for target, row in zip(documents, indices, strict=True):
            lengths = [piece.length for piece in self.pieces(int(row))]
            target[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
        return documents

    def read_packed(self, indices: Longs) -> PackedBatch:
        """Rows `indices` [m] with the documents of their tokens."""
        return PackedBatch(self.read(indices), self.documents(indices))

    def whole_share(self, windows: Sequence[int] | None = None) -> float:
        """Share of the documents that fit a row and were left whole, over `windows` or all; 1 where
        none would fit."""
        chosen = range(-(-len(self) // WINDOW_ROWS)) if windows is None else windows
        fit = whole = 0
        for window in chosen:
            first = window * WINDOW_ROWS * self.row
            inside = _documents(self.store.starts, first, self._stop(first))
            starts = {start for start, stop, _ in inside if stop - start <= self.row}
            lengths = {start: stop - start for start, stop, _ in inside}
            fit += len(starts)
            for piece in (piece for row in self._rows(window) for piece in row):
                whole += piece.start in starts and piece.length == lengths[piece.start]
        return whole / fit if fit else 1.0

    def _stop(self, first: int) -> int:
        return min(first + WINDOW_ROWS * self.row, self.store.n_tokens)

    def _plan(self, window: int) -> tuple[Row, ...]:
        first = window * WINDOW_ROWS * self.row
        documents = _documents(self.store.starts, first, self._stop(first))
        return plan_rows([Piece(a, b - a, ends) for a, b, ends in documents], self.row)


def check_ends(store: TokenStore, end_of_text: int) -> None:
    """Refuse a store whose documents do not all end with `end_of_text`, for attention would cross
    from one into the next; looks at `_CHECKED` of them, evenly spread. Raises DataError."""
    ends = store.starts[1:][:: max(1, store.n_documents // _CHECKED)] - 1
    tokens = as_plain(store.tokens)
    for number, end in enumerate(ends.tolist()):
        if (found := int(tokens[end : end + 1][0])) != end_of_text:
            raise DataError(
                f"token store {store.prefix}: a document ends with token {found}, not with the end "
                f"of text {end_of_text} (number {number} of those looked at); build it again, or "
                "set data.packing = 'stream'"
            )


def plan_rows(documents: Sequence[Piece], row: int) -> tuple[Row, ...]:
    """`documents`, of which only the last may not end, in ceil(tokens / row) rows; it does not end
    only where the tokens fill all rows."""
    total = sum(document.length for document in documents)
    full, rests = _chop(documents, row)
    bins: list[list[Piece]] = [[] for _ in range(-(-total // row) - len(full))]
    room = [(row, index) for index in range(len(bins))]  # ascending
    left = []
    for piece in sorted(rests, key=lambda piece: (-piece.length, piece.start)):
        at = bisect_left(room, (piece.length, -1))
        if at == len(room):
            left.append(piece)
            continue
        space, index = room.pop(at)
        bins[index].append(piece)
        if space > piece.length:
            insort(room, (space - piece.length, index))
    _fill(bins, room, left)
    packed = (tuple(sorted(pieces, key=lambda piece: not piece.ends)) for pieces in bins)
    return (*((piece,) for piece in full), *packed)


def _chop(documents: Sequence[Piece], row: int) -> tuple[list[Piece], list[Piece]]:
    """Pieces of a whole row, and what is left of each document at its end."""
    full, rests = [], []
    for document in documents:
        whole, rest = divmod(document.length, row)
        stop = document.start + document.length
        for index in range(whole):
            last = index == whole - 1 and not rest
            full.append(Piece(document.start + index * row, row, document.ends and last))
        if rest:
            rests.append(Piece(stop - rest, rest, document.ends))
    return full, rests


def _fill(bins: list[list[Piece]], room: list[tuple[int, int]], left: list[Piece]) -> None:
    """Cut `left` into the holes, the largest first. A hole that is filled by the head of a document
    is so at the row's end; the row whose last piece does not end already comes last, where what is
    left ends too."""
    unended = {index for index, pieces in enumerate(bins) if not all(p.ends for p in pieces)}
    holes = sorted(room, key=lambda hole: (hole[1] in unended, -hole[0], hole[1]))
    queue = _cuts(sorted(left, key=lambda piece: not piece.ends), [space for space, _ in holes])
    for hole, piece in queue:
        bins[holes[hole][1]].append(piece)


def _cuts(left: Sequence[Piece], spaces: list[int]) -> Iterator[tuple[int, Piece]]:
    """(hole, piece) of all of `left`, hole after hole; together they have room for it."""
    hole = 0
    for piece in left:
        start, length = piece.start, piece.length
        while length:
            taken = min(length, spaces[hole])
            yield hole, Piece(start, taken, piece.ends and taken == length)
            start, length = start + taken, length - taken
            spaces[hole] -= taken
            hole += spaces[hole] == 0


def _documents(starts: Longs, first: int, stop: int) -> list[tuple[int, int, bool]]:
    """(start, stop, does it end here) of the parts of documents in tokens [first, stop)."""
    low = int(np.searchsorted(starts, first, side="right")) - 1
    high = int(np.searchsorted(starts, stop, side="left"))
    edges = starts[low : high + 1]
    parts = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return [(max(a, first), min(b, stop), b <= stop) for a, b in parts if b > a]
