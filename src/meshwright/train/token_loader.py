"""PyTorch's DataLoader with many of our batches in a message, and a state that is one integer.

A message from a worker costs as much as reading dozens of small batches. So each brings a group of
them, which is cut up here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from meshwright.train.dataset import TokenBatch, TokenDataset, token_batch

_MESSAGE = 4  # times what is read at once: shared memory costs more to set up than to fill


class TokenLoader:
    """The batches of `dataset`, read by `workers` processes, or by this one if there are none.

    `state_dict` says where the batch after the last one given begins, whatever was read ahead of
    it; any number of workers, and any other share of the run, takes it up.
    """

    def __init__(self, dataset: TokenDataset, workers: int = 0, pin_memory: bool = False) -> None:
        self.dataset, self.workers, self.pin_memory = dataset, workers, pin_memory
        self._next_sample = dataset.rows.position_of(dataset.state_dict())

    def __iter__(self) -> Iterator[TokenBatch]:
        """From the state on; what an earlier iterator has read ahead is read again."""
        dataset = self.dataset.at(self._next_sample)
        for batch in self._from_workers(dataset) if self.workers else dataset:
            self._next_sample = batch.next_sample
            yield batch.pin_memory() if self.pin_memory else batch

    def _from_workers(self, dataset: TokenDataset) -> Iterator[TokenBatch]:
        groups = _Groups(dataset)
        for group in DataLoader(groups, batch_size=None, num_workers=self.workers):
            yield from groups.cut(group)

    def state_dict(self) -> dict[str, Any]:
        """An integer and a fingerprint."""
        return self.dataset.rows.state(self._next_sample)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there at the next `iter`. Raises DataError if it is of other data."""
        self._next_sample = self.dataset.rows.position_of(state)


class _Groups(IterableDataset[TokenBatch]):
    """So many batches of `dataset` in one that a message is worth it; `next_sample` is that of the
    first of them."""

    def __init__(self, dataset: TokenDataset) -> None:
        self.dataset, self.share = dataset, dataset.share
        self.rows = len(self.share.samples(0))  # of a batch
        self.group = max(1, dataset.rows.at_once * _MESSAGE // self.rows)

    def __iter__(self) -> Iterator[TokenBatch]:
        info, reader = get_worker_info(), self.dataset.reader(self.share)
        assert info is not None
        for number in count(info.id, info.num_workers):
            first = number * self.group
            content = reader.contents(first, first + self.group)
            yield token_batch(content, reader.first_sample(first + 1))

    def cut(self, group: TokenBatch) -> Iterator[TokenBatch]:
        """The batches of a group."""
        next_sample, documents = group.next_sample, group.documents
        cut = repeat(None) if documents is None else documents.split(self.rows)
        for tokens, of in zip(group.tokens.split(self.rows), cut, strict=False):
            yield TokenBatch(tokens, next_sample, of)
            next_sample += self.share.batch
