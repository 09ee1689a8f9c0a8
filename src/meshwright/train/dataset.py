"""Our samples for any PyTorch trainer: an IterableDataset in the one order of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from meshwright.data.order import MixedRows
from meshwright.data.reader import BatchReader
from meshwright.data.share import Share

Sample = dict[str, Tensor | int]


class TokenDataset(IterableDataset[Sample]):
    """Batches of one rank: `{"tokens": int64 [m, seq_len + 1], "next_sample": int}`.

    Give it to a `DataLoader` with `batch_size=None` and any number of workers, which share the
    batches out and change nothing of their order. To resume, hand `next_sample` of the last
    batch you trained on to `at`, or use `state_dict` where nothing is read ahead of you (no
    workers) or the loader collects it from its workers (torchdata's StatefulDataLoader).
    """

    def __init__(self, rows: MixedRows, batch: int, rank: int = 0, world: int = 1) -> None:
        """`batch` samples of all `world` ranks a step. Raises ConfigError."""
        super().__init__()
        self.rows, self.share = rows, Share(batch, rank, world)
        self._state = rows.state(0)
        self._reader: BatchReader[npt.NDArray[np.int64]] | None = None

    def at(self, sample: int) -> TokenDataset:
        """This data set from sample `sample` of the run on."""
        self.load_state_dict(self.rows.state(sample))
        return self

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        share = replace(self.share, worker=info.id, workers=info.num_workers) if info else None
        self._reader = BatchReader(self.rows, share or self.share)
        self._reader.load_state_dict(self._state)
        for batch in self._reader:
            yield {"tokens": torch.from_numpy(batch.content), "next_sample": batch.next_sample}

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins: an integer and a fingerprint."""
        return self._reader.state_dict() if self._reader else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there at the next `iter`. Raises DataError if it is of other data."""
        self.rows.position_of(state)
        self._state, self._reader = state, None
