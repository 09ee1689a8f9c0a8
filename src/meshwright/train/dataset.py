"""Our samples for any PyTorch trainer: an IterableDataset in the one order of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from meshwright.data.documents import WithDocuments
from meshwright.data.order import MixedRows
from meshwright.data.packing import PackedBatch
from meshwright.data.reader import BatchReader
from meshwright.data.share import Share

Content = npt.NDArray[np.int64] | PackedBatch


@dataclass(frozen=True)
class TokenBatch:
    """`tokens`, int64 [m, seq_len + 1], and the sample of the run at which the next batch begins.

    `documents`, where they were asked for, int32 [m, seq_len + 1], is the document of each token,
    counted from 0 in each row, -1 for padding: attention stays inside each, and what begins one is
    no target. No dict, for `DataLoader` takes those apart, which costs as much as reading one.
    """

    tokens: Tensor
    next_sample: int
    documents: Tensor | None = None

    @property
    def cu_seqlens(self) -> Tensor:
        """Where each document begins in the rows laid end to end, and their end, int32: for kernels
        with variable lengths. Raises ValueError without `documents`."""
        if self.documents is None:
            raise ValueError("these batches have no documents: TokenDataset(..., documents=True)")
        packed = PackedBatch(self.tokens.numpy(), self.documents.numpy())
        return torch.from_numpy(packed.cu_seqlens)

    def pin_memory(self) -> TokenBatch:
        """A copy in memory that a GPU copies from by itself; a `DataLoader` calls it."""
        documents = None if self.documents is None else self.documents.pin_memory()
        return TokenBatch(self.tokens.pin_memory(), self.next_sample, documents)


class TokenDataset(IterableDataset[TokenBatch]):
    """Batches of one rank, as `TokenBatch`.

    Give it to a `DataLoader` with `batch_size=None` and any number of workers, which share the
    batches out and change nothing of their order. To resume, hand `next_sample` of the last
    batch you trained on to `at`, or use `state_dict` where nothing is read ahead of you (no
    workers) or the loader collects it from its workers (torchdata's StatefulDataLoader).
    `token_loader.TokenLoader` has a state of its own, and moves small batches many at a time.
    """

    def __init__(
        self, rows: MixedRows, batch: int, rank: int = 0, world: int = 1, documents: bool = False
    ) -> None:
        """`batch` samples of all `world` ranks a step. Raises ConfigError."""
        super().__init__()
        self.rows, self.share = rows, Share(batch, rank, world)
        self._documents = documents
        self._state = rows.state(0)
        self._reader: BatchReader[Any] | None = None

    def at(self, sample: int) -> TokenDataset:
        """This data set from sample `sample` of the run on."""
        self.load_state_dict(self.rows.state(sample))
        return self

    def __iter__(self) -> Iterator[TokenBatch]:
        info = get_worker_info()
        share = replace(self.share, worker=info.id, workers=info.num_workers) if info else None
        self._reader = self.reader(share or self.share)
        for batch in self._reader:
            yield token_batch(batch.content, batch.next_sample)

    def reader(self, share: Share) -> BatchReader[Any]:
        """Of `share`, from where this data set stands; its contents are `Content`."""
        reader: BatchReader[Any] = BatchReader(
            WithDocuments(self.rows) if self._documents else self.rows, share
        )
        reader.load_state_dict(self._state)
        return reader

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins: an integer and a fingerprint."""
        return self._reader.state_dict() if self._reader else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there at the next `iter`. Raises DataError if it is of other data."""
        self.rows.position_of(state)
        self._state, self._reader = state, None


def token_batch(content: Content, next_sample: int) -> TokenBatch:
    """What a reader gave, as tensors over the same memory."""
    if isinstance(content, PackedBatch):
        documents = torch.from_numpy(content.documents)
        return TokenBatch(torch.from_numpy(content.tokens), next_sample, documents)
    return TokenBatch(torch.from_numpy(content), next_sample)
