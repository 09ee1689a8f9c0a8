"""A process that imports what workers need while its parent does other things."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self

from meshwright.base.errors import RunError
from meshwright.conduct.protocol import LineBuffer, encode, signal_name

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


class WarmProcess:
    """The parent's side of one. A context manager: leaving it ends the process.

    Start it on a thread that lives as long as it shall: it dies with that thread.
    """

    def __init__(self, module: str, preload: str, options: Sequence[str], fds: Sequence[int]):
        """Start `module`, which imports `preload` and then obeys; returns at once.

        It is given `--preload`, `--control-fd` and `options`, and inherits `fds`.
        """
        self._preload = preload
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = self._spawn(module, theirs.fileno(), options, fds)
        self._control.setblocking(False)
        self._report_lines = LineBuffer()
        self._reports: deque[dict[str, Any]] = deque()
        self._warm = self._lost = self._closed = False

    def _spawn(
        self, module: str, control_fd: int, options: Sequence[str], fds: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        # -P: a torch.py in the current directory must not be taken for torch.
        command = [sys.executable, "-P", "-m", module, "--preload", self._preload]
        command += ["--control-fd", str(control_fd), *options]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=(control_fd, *fds),
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

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def wait_warm(self, timeout_s: float) -> bool:
        """Whether the launcher can fork, waiting up to `timeout_s`.

        Raises RunError if it died, with the last lines it wrote.
        """
        if not self._warm:
            self._warm = self._await("warm", timeout_s) is not None
        return self._warm

    def ask(self, request: Mapping[str, Any], event: str, timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its answer `event`. Raises RunError if there is none."""
        self._send(request)
        answer = self._await(event, timeout_s)
        if answer is None:
            raise RunError(f"no answer to {request['op']} within {timeout_s:g} s")
        return answer

    def close(self) -> None:
        """End the process, and wait until it is gone."""
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
        self._control.close()
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
            wait_for([self._control.fileno()], left_s)

    def _read_reports(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                while data := self._control.recv(_READ_BYTES):
                    lines = self._report_lines.feed(data)
                    self._reports.extend(json.loads(line) for line in lines)
            except ConnectionResetError:
                pass
            self._lost = True

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


def wait_for(descriptors: list[int], timeout_s: float, mask: int = select.POLLIN) -> None:
    """Until one has something to read (mask 0: until one hangs up), or the time is over."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, mask)
    poller.poll(max(0.0, timeout_s) * 1000)
