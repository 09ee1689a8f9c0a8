"""Engine `local`: the ranks of a run are processes of this machine, forked by a warm launcher."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping
from fcntl import F_SETPIPE_SZ, fcntl
from pathlib import Path
from typing import Any, Self

from meshwright.base.errors import RunError
from meshwright.conduct.protocol import Exit, LineBuffer, Message, parse_message
from meshwright.conduct.warm import WarmProcess, wait_for

_log = logging.getLogger(__name__)

_PIPE_BYTES = 1 << 20  # the most an unprivileged user may ask for (pipe(7))
_READ_BYTES = 1 << 16


class LocalEngine(WarmProcess):
    """The parent's side of one launcher. A context manager: leaving it leaves no process behind.

    Start it as early as possible: imports go on in the background while the caller prepares.
    Start it on a thread that lives as long as the run: the launcher dies with that thread.
    """

    def __init__(self, preload: str, module: str = "meshwright.conduct.launcher") -> None:
        self._events, event_fd = os.pipe()
        fcntl(event_fd, F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._events, False)
        self._message_lines = LineBuffer()
        try:
            options = ["--event-fd", str(event_fd)]
            super().__init__(module, preload, options, [event_fd])
        finally:
            os.close(event_fd)

    @classmethod
    def start(cls, preload: str) -> Self:
        """Start a launcher that imports the module `preload`; returns at once."""
        return cls(preload)

    @classmethod
    def start_either(cls, preload: str) -> Self:
        """The same, but a `Fleet` may have it for its nursery instead."""
        return cls(preload, "meshwright.conduct.forker")

    def launch(
        self,
        entry: str,
        world: int,
        log_dir: Path,
        args: Mapping[str, Any],
        timeout_s: float = 120.0,
    ) -> tuple[int, ...]:
        """Fork `world` workers that call `entry` ("module:function"); their pids, by rank.

        `args` is plain JSON and reaches each worker in its WorkerContext. `log_dir` exists.
        Raises RunError if the launcher is not warm or has not forked in `timeout_s`, or refuses.
        """
        deadline_s = time.monotonic() + timeout_s
        if not self.wait_warm(timeout_s):
            late = f"launcher still imports {self._preload} after {timeout_s:g} s"
            raise RunError(f"{late}: {self._last_words()}")
        request = {"op": "launch", "entry": entry, "world": world, "args": dict(args)}
        self._send({**request, "log_dir": str(log_dir.resolve())})
        answer = self._await("launched", deadline_s - time.monotonic())
        if answer is None:
            raise RunError(f"launcher has not forked {world} workers in {timeout_s:g} s")
        return tuple(answer["pids"])

    def stop(self, number: signal.Signals) -> None:
        """Send a signal to every worker that lives; none if there is none."""
        self._send({"op": "stop", "signal": number.name})

    def poll(self, timeout_s: float) -> list[Message | Exit]:
        """What workers said and which ended, waiting up to `timeout_s` for the first of them.

        All that a worker said comes before its Exit. Raises RunError if the launcher died.
        """
        wait_for([self._control.fileno(), self._events], 0.0 if self._reports else timeout_s)
        # Reports first: what a worker said is in the pipe before its death can be reported.
        self._read_reports()
        messages = self._read_messages()
        exits = [_as_exit(report) for report in self._reports if report["event"] == "exit"]
        self._reports.clear()
        if self._lost and not exits and not messages:
            raise RunError(self._obituary())
        return [*messages, *exits]

    def close(self) -> None:
        """End the launcher and every worker, and wait until they are gone."""
        if self._closed:
            return
        super().close()
        # Workers of a launcher that was killed die with it, a moment later. The pipe hangs up
        # when the last one has gone.
        wait_for([self._events], timeout_s=2.0, mask=0)
        os.close(self._events)

    def _read_messages(self) -> list[Message]:
        """All that was in the pipe when we began, and no more: busy workers cannot hold us here."""
        messages: list[Message] = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(_PIPE_BYTES // _READ_BYTES + 1):
                data = os.read(self._events, _READ_BYTES)
                if not data:  # the launcher keeps the pipe open as long as it lives
                    self._lost = True
                    break
                for line in self._message_lines.feed(data):
                    if (message := parse_message(line)) is None:
                        _log.warning("dropped a line that is no message: %.200r", line)
                    else:
                        messages.append(message)
        return messages


def _as_exit(report: Mapping[str, Any]) -> Exit:
    return Exit(**{key: value for key, value in report.items() if key != "event"})
