"""The service's side of `meshwright.cli.warmed`: processes that wait for a job with all imports
done, and go on without the service once they have one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.base.errors import RunError
from meshwright.control.engines.processes import ProcessId, process_id, send

COMMAND = (sys.executable, "-P", "-m", "meshwright.cli.warmed")
GENTLY = "--gently"  # beside runs, which go first


@dataclass(frozen=True)
class Waiting:
    """One that has no job yet, and ends when the service does."""

    id: ProcessId
    _line: socket.socket
    _process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, gently: bool) -> Waiting:
        """Start to warm one up; it can be given its job at once."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [*COMMAND, *([GENTLY] if gently else [])],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # it is not of the service's terminal, nor of its group
            )
        found = process_id(process.pid)
        if found is None:
            ours.close()
            process.wait()
            raise RunError("the process that conducts runs ended at once; see the service's log")
        return cls(found, ours, process)

    def lives(self) -> bool:
        """Whether it still waits."""
        return self._process.poll() is None

    def give(self, job: dict[str, object], descriptors: Sequence[int]) -> None:
        """Its job. Raises RunError if it is gone; then nothing has happened."""
        try:
            socket.send_fds(self._line, [json.dumps(job).encode()], descriptors)
        except (BrokenPipeError, ConnectionError) as error:
            raise RunError("the process that was to conduct the run is gone") from error
        with contextlib.suppress(OSError):  # where it may not be done, it was not slowed down
            os.setpriority(os.PRIO_PROCESS, self.id.pid, 0)
        send(self.id, signal.SIGCONT)  # it hurries, if it is not warm yet

    def let_go(self) -> subprocess.Popen[bytes]:
        """Close the line to it: without a job it ends. What to `poll`, or it stays a zombie."""
        self._line.close()
        return self._process


@dataclass
class Warmer:
    """Keeps one ready."""

    _waiting: Waiting | None = None
    _gone: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def take(self) -> Waiting:
        """The one that is warm, or a new one that is not."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.lives():
            return waiting
        if waiting is not None:
            self.forget(waiting)
        return Waiting.start(gently=False)

    def forget(self, waiting: Waiting) -> None:
        """It has its job, or shall have none."""
        self._gone.append(waiting.let_go())

    def tend(self, quiet: bool, gently: bool) -> None:
        """Bury the dead and, while no run is about to start, warm up the next."""
        self._gone = [process for process in self._gone if process.poll() is None]
        if self._waiting is not None and not self._waiting.lives():
            waiting, self._waiting = self._waiting, None
            self.forget(waiting)
        elif self._waiting is None and quiet:
            self._waiting = Waiting.start(gently)

    def close(self) -> None:
        """The one that waits ends; those that have a job go on."""
        if self._waiting is not None:
            self.forget(self._waiting)
            self._waiting = None
        for process in self._gone:
            process.poll()
            process.returncode = process.returncode or 0  # it is no child to be waited for
