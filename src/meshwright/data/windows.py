"""Token stores as samples of one length, by sample number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from meshwright.base.errors import DataError
from meshwright.data.store import TokenStore, as_plain, bring


class Windows:
    """Non-overlapping windows over the concatenated documents of a store.

    Window i is tokens [i·seq_len, i·seq_len + seq_len + 1): inputs are all but its last token,
    targets all but its first, so every token but the store's first is a target once.
    """

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        """Raises DataError if the store is too small for one window."""
        if store.n_tokens <= seq_len:
            raise DataError(
                f"the {store.prefix.name} part has {store.n_tokens} tokens, too few for a window "
                f"of data.seq_len = {seq_len} and a target; lower it or name a larger data.source"
            )
        self.store = store
        self.seq_len = seq_len
        self._tokens = as_plain(store.tokens)
        self._count = (store.n_tokens - 1) // seq_len
        self._grid = _overlapping(self._tokens, seq_len, self._count)

    def __len__(self) -> int:
        return self._count

    @property
    def in_memory(self) -> bool:
        """Whether reading is only copying."""
        return self._grid is not None

    def spread(self, count: int) -> npt.NDArray[np.int64]:
        """Up to `count` windows evenly over the store, so that no few files decide a figure."""
        count = min(count, len(self))
        return np.arange(count) * len(self) // count

    def spans(self, indices: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Where in the store the tokens of windows `indices` are, as [start, stop)."""
        starts = (indices * self.seq_len).tolist()
        return [(start, start + self.seq_len + 1) for start in starts]

    def read(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of windows `indices` [m], int64 [m, seq_len + 1]. Raises IndexError."""
        chosen = indices.tolist()
        if chosen and not 0 <= min(chosen) <= max(chosen) < len(self):
            raise IndexError(f"windows {indices} of {len(self)}")
        if self._grid is not None:
            return self._grid[indices].astype(np.int64)
        bring(self._tokens, self.spans(indices))
        out = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        for target, index in zip(out, chosen, strict=True):
            start = index * self.seq_len
            target[:] = self._tokens[start : start + self.seq_len + 1]
        return out

    def documents(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The document of each of their tokens, counted from 0 in each, int32 [m, seq_len + 1]."""
        places = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        found = np.searchsorted(self.store.starts, places, side="right")
        return (found - found[:, :1]).astype(np.int32)


def _overlapping(
    tokens: npt.NDArray[np.integer], seq_len: int, count: int
) -> npt.NDArray[np.integer] | None:
    """All windows as a view [count, seq_len + 1], which numpy gathers from faster than Python could
    one after another; None for what is not in memory."""
    if not isinstance(tokens, np.ndarray):
        return None
    step = tokens.strides[0]
    return as_strided(tokens, (count, seq_len + 1), (seq_len * step, step), writeable=False)


class JoinedWindows:
    """Windows of several stores, numbered one store after the other, to be looked at by `shares`:
    of each store as many as its share, spread evenly over it."""

    def __init__(self, parts: Sequence[Windows], shares: Sequence[float]) -> None:
        """`shares` are one for each part, and one of them above 0."""
        self.parts, self._shares = parts, shares
        self._firsts = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def spread(self, count: int) -> npt.NDArray[np.int64]:
        """Up to `count` windows."""
        edges = np.round(np.cumsum([0.0, *self._shares]) / sum(self._shares) * count).astype(int)
        found = [
            first + part.spread(int(many))
            for part, first, many in zip(self.parts, self._firsts, np.diff(edges), strict=False)
        ]
        return np.concatenate(found).astype(np.int64)

    def read(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of windows `indices` [m], int64 [m, seq_len + 1]. Raises IndexError."""
        out = np.empty((len(indices), self.parts[0].seq_len + 1), dtype=np.int64)
        which = np.searchsorted(self._firsts, indices, side="right") - 1
        for number, part in enumerate(self.parts):
            mine = which == number
            out[mine] = part.read(indices[mine] - self._firsts[number])
        return out
