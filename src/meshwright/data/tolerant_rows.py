"""Rows of tokens of which some may be bad."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import DataError
from meshwright.data.order import Rows
from meshwright.data.packing import PAD
from meshwright.data.store import TokenStore
from meshwright.data.tolerance import BadSamples

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TolerantRows:
    """`rows`, with rows of nothing but padding for those that cannot be read: no target of them
    counts, and all ranks stay in step."""

    rows: Rows
    bad: BadSamples

    @property
    def seq_len(self) -> int:
        """Tokens of a sample less one."""
        return self.rows.seq_len

    @property
    def store(self) -> TokenStore:
        """What they are cut from."""
        return self.rows.store

    def __len__(self) -> int:
        return len(self.rows)

    def spans(self, indices: Longs) -> list[tuple[int, int]]:
        """Nothing that is worth fetching before it is known to be good."""
        del indices
        return []

    def read(self, indices: Longs) -> Longs:
        """Tokens of samples `indices` [m], int64 [m, seq_len + 1]."""
        try:
            return self.rows.read(indices)
        except DataError:
            return np.concatenate(
                [self._read_one(index) for index in np.split(indices, len(indices))]
            )

    def _read_one(self, index: Longs) -> Longs:
        try:
            return self.rows.read(index)
        except DataError as error:
            self.bad.add(error)
            return np.full((1, self.seq_len + 1), PAD, dtype=np.int64)
