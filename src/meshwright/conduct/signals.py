"""Ctrl-C, SIGTERM and a lost terminal as requests to stop: raised before a run, counted in it."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """While it is entered, SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt, until `only_count`.
    Only on the main thread.

    `count` is what `conductor.run` takes as `stop_requests`.
    """

    def __init__(self) -> None:
        self._count = 0
        self._raises = True
        self._before: dict[signal.Signals, Any] = {}

    def count(self) -> int:
        """How many requests have come so far."""
        return self._count

    def only_count(self) -> None:
        """From now on requests are counted alone.

        Raises KeyboardInterrupt if one has come already: Python drops an exception that is raised
        while a finalizer runs, and the user has asked all the same.
        """
        self._raises = False
        if self._count:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        for number in _STOPPING:
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._raises:
            raise KeyboardInterrupt
