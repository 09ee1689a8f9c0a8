"""How often the first rank asks for a save: every so many steps, or by what a save costs."""

from __future__ import annotations

import time
from collections.abc import Callable

from meshwright.checkpoint.interval import daly_interval_s
from meshwright.plan.goodput import DAY_S, FAILURES_PER_NODE_DAY
from meshwright.plan.job import Job


class Pace:
    """When a whole commit is due.

    With `checkpoint.every = "auto"` the first step is saved, to learn what that blocks; then the
    interval is the one that loses least to saves and to steps done again after a failure, at the
    rate at which nodes fail that the planner reckons with; and never so short that a save meets
    the one before.
    """

    def __init__(self, job: Job, nodes: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._every, self._now_s = job.checkpoint.every, now_s
        self._mtbf_s = DAY_S / (nodes * FAILURES_PER_NODE_DAY)
        self._begun_s: float | None = None  # of the last whole save
        self._blocked_s = self._save_s = 0.0

    def is_due(self, step: int) -> bool:
        """Whether `step`, counted from 1, is to be saved whole."""
        if self._every != "auto":
            return step % self._every == 0
        if self._begun_s is None:
            return True
        return self._now_s() - self._begun_s >= self.interval_s

    @property
    def interval_s(self) -> float:
        """Seconds between two whole saves, by what the last one has cost."""
        best_s = daly_interval_s(max(self._blocked_s, 1e-3), self._mtbf_s)
        return max(best_s, 2 * self._save_s)

    def saved(self, blocked_s: float) -> None:
        """A whole save has been begun, which has held up training."""
        self._begun_s, self._blocked_s = self._now_s(), blocked_s

    def committed(self, save_s: float) -> None:
        """It has been committed so long after."""
        self._save_s = save_s
