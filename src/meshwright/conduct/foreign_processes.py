"""The processes of a foreign script: started cold or out of a warm spare, and ended to the last."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.errors import InputError
from meshwright.conduct import foreign_spare
from meshwright.conduct.processes import read_process
from meshwright.conduct.protocol import die_with_parent, encode

_GONE_S = 5.0  # for orphans, which are killed; then they are the system's
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Command:
    """A command line, and how a spare can run it: None where it cannot."""

    words: tuple[str, ...]
    spare: tuple[str, ...] | None  # what follows the interpreter


def command(words: Sequence[str]) -> Command:
    """Look at a command line: `python SCRIPT ...` and `python -m MODULE ...` can run in spares."""
    name, rest = Path(words[0]).name, tuple(words[1:])
    while rest[:1] == ("-u",):
        rest = rest[1:]
    fits = bool(rest) and (not rest[0].startswith("-") or (rest[0] == "-m" and len(rest) > 1))
    return Command(tuple(words), rest if name.startswith("python") and fits else None)


@dataclass
class Child:
    """One process, which leads a group of its own."""

    process: subprocess.Popen[bytes]
    pidfd: int

    @property
    def pid(self) -> int:
        """Its process id, which is that of its group."""
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        """Signal it and what it has started; nothing if it is gone."""
        if number in (signal.SIGABRT, signal.SIGTERM):  # its own children are its own business
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def ends(self, timeout_s: float) -> bool:
        """Whether it is over, waiting for that for up to `timeout_s`."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(1000 * timeout_s))

    def reap(self) -> int:
        """Its exit code, or minus its signal; it has ended. What is left of its group is killed."""
        code = self.process.wait()
        self.send(signal.SIGKILL)
        os.close(self.pidfd)
        return code


@dataclass
class Spare:
    """A warm process, or one that is getting warm."""

    child: Child
    control: socket.socket
    log: Path

    def warm(self) -> bool:
        """Whether all its imports are done."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            return self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"w"
        return False

    def become(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """Have it run `argv` as a rank. Its death, now or earlier, shows as that of the rank."""
        order = {"argv": list(argv), "env": dict(environment), "log": str(log)}
        with contextlib.suppress(ConnectionError):
            self.control.sendall(encode(order))
        self.control.close()
        return self.child


def start(words: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
    """Start a rank cold. Raises InputError if the program cannot be run."""
    with log.open("ab") as output:
        return _spawn(words, environment, output.fileno(), ())


def start_spare(
    interpreter: str, preload: Sequence[str], environment: Mapping[str, str], log: Path
) -> Spare:
    """Start a spare, which imports `preload`. Raises InputError if the program cannot be run."""
    control, theirs = socket.socketpair()
    words = [interpreter, str(foreign_spare.__file__), str(theirs.fileno()), *preload]
    try:
        with theirs, log.open("wb") as output:
            child = _spawn(words, environment, output.fileno(), (theirs.fileno(),))
    except BaseException:
        control.close()
        raise
    return Spare(child, control, log)


def _spawn(
    words: Sequence[str], environment: Mapping[str, str], output: int, keep: tuple[int, ...]
) -> Child:
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            pass_fds=keep,
            start_new_session=True,  # Ctrl-C in the terminal is for the supervisor alone
            preexec_fn=die_with_parent,
        )
    except OSError as error:
        raise InputError(f"{words[0]}: cannot be run ({error.strerror}); name a program") from error
    return Child(process, os.pidfd_open(process.pid))


def adopt_orphans() -> None:
    """Become the parent of whatever ranks start and leave behind, so that it can be found."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def end_orphans(keep: Iterable[int]) -> None:
    """Kill all that descends from this process, but for `keep` and what descends from those."""
    kept, deadline_s = frozenset(keep), time.monotonic() + _GONE_S
    while (pids := descendants(kept)) and time.monotonic() < deadline_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def descendants(keep: frozenset[int] = frozenset()) -> list[int]:
    """Processes that this one has started, and those that they have; not `keep` and theirs."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if process := read_process(int(entry.name)):
            parents[int(entry.name)] = process.parent
    found, fresh = set[int](), {os.getpid()}
    while fresh := {pid for pid, parent in parents.items() if parent in fresh} - found - keep:
        found |= fresh
    return sorted(found)
