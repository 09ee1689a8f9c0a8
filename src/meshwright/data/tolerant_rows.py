"""Rows of tokens of which some may be bad: damaged, or of ids that the model does not have."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import DamagedError
from meshwright.data.order import Rows
from meshwright.data.packing import PAD
from meshwright.data.store import TokenStore
from meshwright.data.tolerance import BadSamples

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TolerantRows:
    """`rows`, with rows of nothing but padding for those that are bad: no target of them counts,
    all ranks stay in step, and every reader gets the same. `vocab`: ids are below it; None: any.
    `why` says what is wrong with those met so far, by number."""

    rows: Rows
    bad: BadSamples
    vocab: int | None = None
    why: dict[int, str] = field(default_factory=dict)

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
        """Where in the store the tokens of samples `indices` are, as [start, stop)."""
        return self.rows.spans(indices)

    def read(self, indices: Longs) -> Longs:
        """Tokens of samples `indices` [m], int64 [m, seq_len + 1]."""
        try:
            return self._checked(indices)
        except DamagedError:
            return np.concatenate(
                [self._read_one(index) for index in np.split(indices, len(indices))]
            )

    def documents(self, indices: Longs) -> npt.NDArray[np.int32]:
        """The document of each of their tokens as if none were bad, int32 [m, seq_len + 1]."""
        return self.rows.documents(indices)

    def _checked(self, indices: Longs) -> Longs:
        found = self.rows.read(indices)
        if self.vocab is not None and found.size and (highest := int(found.max())) >= self.vocab:
            where = f"row {indices[0]} of {self.store.prefix}.bin"
            what = f"token id {highest} is outside model.vocab = {self.vocab}"
            raise DamagedError(f"{where}: {what}; build it again")
        return found

    def _read_one(self, index: Longs) -> Longs:
        try:
            return self._checked(index)
        except DamagedError as error:
            self.why[int(index[0])] = str(error)
            self.bad.add(error)
            return np.full((1, self.seq_len + 1), PAD, dtype=np.int64)
