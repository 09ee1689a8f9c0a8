"""The batches of one rank, step by step: read ahead where that pays, never lost, never twice.

A batch is a function of its step, so whatever happens between two steps, the step that comes next
is asked for by its number.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from meshwright.data.feed import Feed
from meshwright.data.feed_control import Controls, Limits, replays

_MEMORY_BYTES = 256 << 20  # of batches that wait; a rank is one of several on its host
_PAYS = 0.01  # share of a step: reading that takes less is not worth a thread,
_LEAST_S = 5e-4  # nor what costs hardly more than to hand a batch over
_LOOK_AFTER = 4  # steps

Numbered = tuple[int, Tensor]


class StepFeed:
    """`read(step)`, called in this thread while that takes next to nothing of a step, and ahead of
    need by a `Feed` from then on.

    `idle` is called now and then while a batch is waited for; what it raises is raised by `take`,
    and nothing is lost. With `replay`, every other run of so many steps gets the last batch again
    and again, and what they would have read is read by the steps after them: a trial.
    """

    def __init__(
        self, read: Callable[[int], Tensor], replay: int | None = None, ahead: bool = False
    ) -> None:
        """`ahead`: by threads from the first step on, for reads that are known to be slow."""
        self._read, self._replay, self._replayed = read, replay, 0
        self._ahead = ahead
        self.idle: Callable[[], object] = lambda: None
        self._last: Numbered | None = None
        self._feed: Feed[Numbered] | None = None
        self._controls = Controls()  # of the feed before
        self._next = 0  # the step whose batch the feed gives next
        self._times = ReadingTimes()
        self._advised = False

    def take(self, step: int) -> Tensor:
        """The batch of step `step`, from 0: as a rule that of the step before it, and one."""
        if self._last is not None and replays(step, self._replay):
            self._replayed += 1
            return self._last[1]
        step -= self._replayed
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        self._last = None  # before the next one is made: that much less memory
        if self._ahead and self._feed is None:
            self._start(step)
        tokens = self._read_here(step) if self._feed is None else self._from_feed(step)
        self._last = (step, tokens)
        return tokens

    def advice(self) -> str | None:
        """What keeps this rank waiting and would help, in one line; said once, and not before the
        feed has done what it can."""
        if self._feed is None or self._advised:
            return None
        report = self._feed.report()
        if report.advice is None or not report.at_limit:
            return None
        self._advised = True
        return report.advice

    @property
    def readers(self) -> int:
        """Threads that read; 0 while that is done here."""
        return 0 if self._feed is None else self._feed.controls.workers

    def close(self) -> None:
        """End the threads; reads that are under way are not waited for."""
        feed, self._feed = self._feed, None
        if feed is not None:
            self._controls = feed.controls
            feed.close(wait=False)

    def _read_here(self, step: int) -> Tensor:
        begun = time.perf_counter()
        tokens = self._read(step)
        self._times.add(begun, time.perf_counter())
        if self._times.want_a_thread:
            self._start(step + 1)
        return tokens

    def _from_feed(self, step: int) -> Tensor:
        if step != self._next:
            self.close()
            self._start(step)
        assert self._feed is not None
        number, tokens = next(self._feed)
        self._next = number + 1
        if number != step:  # an earlier `next` was cut short after it had taken a batch
            return self._from_feed(step)
        return tokens

    def _start(self, step: int) -> None:
        self._next = step
        self._feed = Feed(
            lambda index: (step + index, self._read(step + index)),
            lambda batch: batch[1].nbytes,
            Limits(memory_bytes=_MEMORY_BYTES),
            idle=lambda: self.idle(),
            controls=self._controls,
        )
        self._feed.open()


class ReadingTimes:
    """How much of the last steps was reading, and whether it had better be done ahead of need."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._steps, self._read_s = 0, 0.0
        self.want_a_thread = False

    def add(self, begun: float, ended: float) -> None:
        """A read from `begun` to `ended`; the first one only begins the count, for it finds cold
        pages and no step before it."""
        if self._begun is None:
            self._begun = ended
            return
        self._steps, self._read_s = self._steps + 1, self._read_s + ended - begun
        if self._steps == _LOOK_AFTER:
            least_s = max(_PAYS * (ended - self._begun), _LEAST_S * self._steps)
            self.want_a_thread = self._read_s > least_s
            self._begun, self._steps, self._read_s = ended, 0, 0.0
