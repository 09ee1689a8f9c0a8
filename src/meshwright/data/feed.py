"""Batches read ahead by threads whose number and reach follow what the trainer waits.

Threads and not processes: reading tokens is copying, during which others run, and handing arrays
between processes costs more than that. Start a feed after any fork.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread
from types import TracebackType
from typing import Generic, Self, TypeVar

from meshwright.data.feed_control import Controls, Limits, Seen, adjust, advice, at_limit

T = TypeVar("T")

_FIRST_LOOK = 4  # steps before the first adjustment
_LOOK_EVERY = 16
_FETCHES = 32  # that averages are taken over
_IDLE_S = 0.05  # between two calls of `idle` while a batch is waited for


@dataclass(frozen=True)
class FeedReport:
    """Since the last report: steps, time in all and blocked in `next()`, batches that were ready
    when asked (0: starved), and the controls and advice as they are now. `at_limit`: the feed can
    do no more by itself."""

    steps: int
    total_s: float
    wait_s: float
    ready: float
    workers: int
    depth: int
    advice: str | None
    at_limit: bool = False

    @property
    def wait_share(self) -> float:
        """Share of the time that was waiting."""
        return self.wait_s / self.total_s if self.total_s else 0.0


class Feed(Generic[T]):
    """An endless iterator over `read(0)`, `read(1)`, ..., each called once, by several threads.

    What `read` raises is raised by `next` in that batch's turn. A context manager: leaving it ends
    the threads. `size` says how many bytes a batch takes. `idle` is called now and then while
    `next` waits; what it raises leaves `next`, before a batch has been taken. `controls` are those
    of an earlier feed, so that nothing has to be found out anew.
    """

    def __init__(
        self,
        read: Callable[[int], T],
        size: Callable[[T], int],
        limits: Limits | None = None,
        adaptive: bool = True,
        idle: Callable[[], object] = lambda: None,
        controls: Controls | None = None,
    ) -> None:
        self._read, self._size, self.limits = read, size, limits or Limits()
        self._adaptive, self._idle = adaptive, idle
        self.controls = controls or Controls()
        self._changed = Condition()
        self._ready: dict[int, T | BaseException] = {}
        self._given = self._taken = 0  # batches handed to readers, and to the trainer
        self._readers = 0
        self._closed = False
        self._fetches: deque[float] = deque(maxlen=_FETCHES)
        self._batch_bytes = 0
        self._replayed: T | None = None
        self._look, self._report = _Window(), _Window()
        self._seen: Seen | None = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def open(self) -> None:
        """Begin to read."""
        with self._changed:
            self._hire()

    def __exit__(
        self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        self.close()

    def close(self, wait: bool = True) -> None:
        """End the threads, and wait for the reads under way if asked to."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
            if wait:
                self._changed.wait_for(lambda: self._readers == 0)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._replayed is not None:
            return self._replayed
        begun = time.perf_counter()
        with self._changed:
            ready = len(self._ready)
            while not self._changed.wait_for(lambda: self._taken in self._ready, _IDLE_S):
                self._idle()
            batch = self._ready.pop(self._taken)
            self._taken += 1
            self._changed.notify_all()
        now = time.perf_counter()
        for window in (self._look, self._report):
            window.add(now, now - begun, ready)
        self._maybe_adjust()
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def replay(self, on: bool) -> None:
        """Give the next batch again and again until switched off: what steps take then is what they
        would take if data cost nothing (see `feed_control.input_bound_share`)."""
        self._replayed = None
        if on:
            self._replayed = next(self)
        else:
            self._look, self._report = _Window(), _Window()

    def report(self) -> FeedReport:
        """What happened since the last one."""
        window, self._report = self._report, _Window()
        self._report.begun = window.ended
        told = advice(self.controls, self._seen, self.limits) if self._seen else None
        ready = window.ready / max(1, window.steps)
        controls = self.controls
        return FeedReport(
            window.steps,
            window.total_s,
            window.wait_s,
            ready,
            controls.workers,
            controls.depth,
            told,
            self._seen is not None and at_limit(controls, self._seen, self.limits),
        )

    def _maybe_adjust(self) -> None:
        window = self._look
        if window.steps < (_LOOK_EVERY if self._seen else _FIRST_LOOK) or not self._fetches:
            return
        with self._changed:
            fetches = list(self._fetches)
            self._seen = Seen(
                steps=window.steps,
                total_s=window.total_s,
                wait_s=window.wait_s,
                fetch_s=sum(fetches) / len(fetches),
                slowest_s=max(fetches),
                batch_bytes=self._batch_bytes,
            )
            if self._adaptive:
                before = self.controls.workers
                self.controls = adjust(self.controls, self._seen, self.limits)
                if self.controls.workers != before:
                    self._fetches.clear()  # what reading takes depends on how many read
            self._look = _Window()
            self._look.begun = window.ended
            self._hire()
            self._changed.notify_all()

    def _hire(self) -> None:
        while self._readers < self.controls.workers:
            self._readers += 1
            Thread(target=self._work, daemon=True).start()

    def _may_take(self) -> bool:
        return (
            self._closed
            or self._readers > self.controls.workers
            or self._given - self._taken < self.controls.depth
        )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_take)
                if self._closed or self._readers > self.controls.workers:
                    self._readers -= 1
                    self._changed.notify_all()
                    return
                index, self._given = self._given, self._given + 1
            self._fetch(index)

    def _fetch(self, index: int) -> None:
        begun = time.perf_counter()
        batch: T | BaseException
        try:
            batch = self._read(index)
            n_bytes = self._size(batch)
        except BaseException as error:  # it is raised where the batch is asked for
            batch, n_bytes = error, 0
        with self._changed:
            self._fetches.append(time.perf_counter() - begun)
            self._batch_bytes = max(self._batch_bytes, n_bytes)
            self._ready[index] = batch
            self._changed.notify_all()


class _Window:
    """Sums over some steps. The first `next` only begins it: there was no step before."""

    def __init__(self) -> None:
        self.begun: float | None = None
        self.ended: float | None = None
        self.steps, self.ready = 0, 0
        self.wait_s = 0.0

    def add(self, now: float, wait_s: float, ready: int) -> None:
        self.ended = now
        if self.begun is None:
            self.begun = now
            return
        self.steps, self.ready = self.steps + 1, self.ready + ready
        self.wait_s += wait_s

    @property
    def total_s(self) -> float:
        return (self.ended - self.begun) if self.begun and self.ended else 0.0
