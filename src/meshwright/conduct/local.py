"""Engine `local`: the ranks of a run are processes of this machine, forked by a warm launcher."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from fcntl import F_SETPIPE_SZ, fcntl
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from meshwright.base.errors import RunError
from meshwright.conduct.protocol import (
    Exit,
    LineBuffer,
    Message,
    encode,
    parse_message,
    signal_name,
)

_log = logging.getLogger(__name__)

_PIPE_BYTES = 1 << 20  # the most an unprivileged user may ask for (pipe(7))
_READ_BYTES = 1 << 16
_TAIL_BYTES = 1 << 12
_FIXED_ENVIRONMENT = {
    # A thread pool in the launcher would deadlock the workers it forks.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # A worker's threads must not spin while they wait: cores are shared with other workers.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Ranks of one machine meet on loopback, whatever the host name resolves to.
    "GLOO_SOCKET_IFNAME": "lo",
}


class LocalEngine:
    """The parent's side of one launcher. A context manager: leaving it leaves no process behind.

    Start it as early as possible: imports go on in the background while the caller prepares.
    Start it on a thread that lives as long as the run: the launcher dies with that thread.
    """

    def __init__(self, preload: str) -> None:
        self._preload = preload
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        self._control, theirs = socket.socketpair()
        self._events, event_fd = os.pipe()
        fcntl(event_fd, F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._events, False)
        try:
            self._process = self._spawn(theirs.fileno(), event_fd)
        finally:
            theirs.close()
            os.close(event_fd)
        self._control.setblocking(False)
        self._report_lines, self._message_lines = LineBuffer(), LineBuffer()
        self._reports: deque[dict[str, Any]] = deque()
        self._warm = self._lost = self._closed = False

    @classmethod
    def start(cls, preload: str) -> Self:
        """Start a launcher that imports the module `preload`; returns at once."""
        return cls(preload)

    def _spawn(self, control_fd: int, event_fd: int) -> subprocess.Popen[bytes]:
        # -P: a torch.py in the current directory must not be taken for torch.
        command = [sys.executable, "-P", "-m", "meshwright.conduct.launcher"]
        command += ["--preload", self._preload]
        command += ["--control-fd", str(control_fd), "--event-fd", str(event_fd)]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=(control_fd, event_fd),
            env={**os.environ, **_FIXED_ENVIRONMENT},
            start_new_session=True,  # Ctrl-C in the terminal is for the conductor alone
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def wait_warm(self, timeout_s: float) -> bool:
        """Whether the launcher can fork, waiting up to `timeout_s`.

        Raises RunError if it died, with the last lines it wrote.
        """
        if not self._warm:
            self._warm = self._await("warm", timeout_s) is not None
        return self._warm

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
        _wait([self._control.fileno(), self._events], 0.0 if self._reports else timeout_s)
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
        self._closed = True
        if self._warm:
            self._send({"op": "quit"})
        else:  # it has no workers, and does not listen before its imports are done
            self._process.kill()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # Workers of a launcher that was killed die with it, a moment later. The pipe hangs up
        # when the last one has gone.
        _wait([self._events], timeout_s=2.0, mask=0)
        self._control.close()
        os.close(self._events)
        self._output.close()

    def _send(self, request: Mapping[str, Any]) -> None:
        self._control.setblocking(True)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # poll() tells of a death
            self._control.sendall(encode(request))
        self._control.setblocking(False)

    def _await(self, event: str, timeout_s: float) -> dict[str, Any] | None:
        """The report `event`, or None after `timeout_s`; reports after it stay for `poll`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._read_reports()
            while self._reports:
                report = self._reports.popleft()
                if report["event"] == "refused":
                    raise RunError(f"launcher refused: {report['error']}")
                if report["event"] == event:
                    return report
            if self._lost:
                raise RunError(self._obituary())
            if (left_s := deadline_s - time.monotonic()) <= 0:
                return None
            _wait([self._control.fileno()], left_s)

    def _read_reports(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                while data := self._control.recv(_READ_BYTES):
                    lines = self._report_lines.feed(data)
                    self._reports.extend(json.loads(line) for line in lines)
            except ConnectionResetError:
                pass
            self._lost = True

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

    def _obituary(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.poll()
        how = f"by {signal_name(-code)}" if code is not None and code < 0 else f"exit code {code}"
        return f"the launcher for {self._preload} died ({how}): {self._last_words()}"

    def _last_words(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        # pread: the launcher shares our file offset, and may be writing.
        tail = os.pread(self._output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        lines = tail.decode(errors="replace").strip().splitlines()[-5:]
        return " | ".join(line.strip() for line in lines) or "it wrote nothing"


def _wait(descriptors: list[int], timeout_s: float, mask: int = select.POLLIN) -> None:
    """Until one has something to read (mask 0: until one hangs up), or the time is over."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, mask)
    poller.poll(max(0.0, timeout_s) * 1000)


def _as_exit(report: Mapping[str, Any]) -> Exit:
    return Exit(**{key: value for key, value in report.items() if key != "event"})
