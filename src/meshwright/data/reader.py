"""Batches of one reader as numpy arrays: for JAX, for a feed, for whoever wants no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from meshwright.data.mixture import Draws
from meshwright.data.order import Order
from meshwright.data.share import Share

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_PLANNED_SAMPLES = 4096  # found at once: the order costs the same for one sample and for hundreds


class Mixed(Protocol[T_co]):
    """What batches are read of: see `order.MixedRows` and `order.MixedSamples`."""

    @property
    def order(self) -> Order:
        """Which sample is which."""

    @property
    def at_once(self) -> int:
        """How many samples are best read together: see `order.MixedRows`."""

    def read_at(self, draws: Draws) -> T_co:
        """The content of a batch."""

    def state(self, k: int) -> dict[str, Any]:
        """See `order.Position`."""

    def position_of(self, state: dict[str, Any]) -> int:
        """See `order.Position`."""


@dataclass(frozen=True)
class Batch(Generic[T]):
    """This reader's part of one global batch: tokens, int64 [m, seq_len + 1], or a list of samples;
    and the sample of the run at which the next global batch begins. Small batches are views of what
    was read together."""

    content: T
    next_sample: int


@dataclass(frozen=True)
class Plan:
    """Draws of the reader's samples in batches `first` to `stop` of its own."""

    first: int
    stop: int
    draws: Draws

    def batches(self, first: int, stop: int) -> Draws:
        """Draws of batches `first` to `stop`."""
        size = len(self.draws.source) // (self.stop - self.first)
        at = slice((first - self.first) * size, (stop - self.first) * size)
        return Draws(self.draws.source[at], self.draws.number[at])


class BatchReader(Iterator[Batch[T]]):
    """The endless batches of `share` from sample `start` of the run on.

    `start` is a multiple of nothing: a run that changes its global batch goes on where it was.
    `state_dict` says where the next batch begins if all workers have read as far as this one.
    """

    def __init__(self, data: Mixed[T], share: Share, start: int = 0) -> None:
        self.data, self.share, self.start = data, share, start
        self._next = 0  # batches that this reader has given
        self._plan = Plan(0, 0, Draws(np.zeros(0, np.int64), np.zeros(0, np.int64)))
        self._size = len(share.samples(0))
        self._held: Any = None  # of batches [_held_first, _held_stop)
        self._held_first = self._held_stop = 0

    def __next__(self) -> Batch[T]:
        index = self._next
        if not self._held_first <= index < self._held_stop:
            stop = index + max(1, self.data.at_once // self._size)
            self._held = self.contents(index, stop)
            self._held_first, self._held_stop = index, stop
        at = (index - self._held_first) * self._size
        content = cast(T, self._held[at : at + self._size])
        self._next += 1
        return Batch(content, self.first_sample(index) + self.share.batch)

    def first_sample(self, index: int) -> int:
        """Where the global batch begins of which this reader's batch `index` is a part."""
        share = self.share
        return self.start + (share.worker + index * share.workers) * share.batch

    def read(self, index: int) -> Batch[T]:
        """This reader's batch `index`, counted from `start`."""
        content = self.contents(index, index + 1)
        return Batch(content, self.first_sample(index) + self.share.batch)

    def contents(self, first: int, stop: int) -> T:
        """Of this reader's batches [first, stop) one after another, read together."""
        plan = self._plan  # another thread may put a new one in its place meanwhile
        if not plan.first <= first < stop <= plan.stop:
            self._plan = plan = self._ahead(first, stop)
        return self.data.read_at(plan.batches(first, stop))

    def _ahead(self, first: int, stop: int) -> Plan:
        stop = max(stop, first + _PLANNED_SAMPLES // self._size)
        firsts = np.array([self.first_sample(number) for number in range(first, stop)])
        ks = firsts[:, None] + np.array(self.share.samples(0))
        return Plan(first, stop, self.data.order.at(ks.ravel()))

    def state_dict(self) -> dict[str, Any]:
        """One integer, and the fingerprint of what it counts; it does not depend on the share."""
        return self.data.state(self.first_sample(self._next) - self.share.worker * self.share.batch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, by whatever share. Raises DataError for other data."""
        self.start, self._next = self.data.position_of(state), 0
        self._plan = Plan(0, 0, self._plan.draws)
        self._held, self._held_first, self._held_stop = None, 0, 0
