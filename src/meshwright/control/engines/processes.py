"""Processes of this machine: told apart from later ones of the same number, found and ended."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_START = 19  # of the fields after the name in proc_pid_stat(5), from 0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOG = re.compile(r"(rank|member|agent)-([0-9]+)\.log")


@dataclass(frozen=True)
class ProcessId:
    """A process, once and for ever: since the machine began."""

    pid: int
    start: int  # ticks since then


def process_id(pid: int) -> ProcessId | None:
    """The one that has the number `pid` now; None if there is none, or it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[_START]))


def lives(process: ProcessId) -> bool:
    """Whether it does."""
    return process_id(process.pid) == process


def send(process: ProcessId, number: signal.Signals) -> bool:
    """Signal it, and no other that has its number by now; whether it was there."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(process.pid)
        try:
            if lives(process):  # asked after the pidfd was opened, so it is the one
                signal.pidfd_send_signal(pidfd, number)
                return True
        finally:
            os.close(pidfd)
    return False


def kill(processes: Iterable[ProcessId], wait_s: float = 0.5) -> None:
    """End them now, and wait for a moment until they are gone."""
    for process in [one for one in processes if send(one, signal.SIGKILL)]:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(process.pid)
            try:
                if lives(process):
                    select.select([pidfd], [], [], wait_s)
            finally:
                os.close(pidfd)


def memory_bytes(pid: int) -> float:
    """What it has in memory; NaN if it is gone."""
    try:
        return float(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return float("nan")


@dataclass(frozen=True)
class Hands:
    """The processes of a run besides its conductor, by number."""

    ranks: dict[int, ProcessId]  # of a run that survives losses: its members
    agents: dict[int, ProcessId]

    @property
    def all(self) -> list[ProcessId]:
        """Agents first: they would note the end of a member."""
        return [*self.agents.values(), *self.ranks.values()]


def hands(run_dir: Path) -> Hands:
    """Found by where they print to: each has a log of its own in the run directory."""
    logs = str(run_dir.resolve() / "logs") + "/"
    found = Hands({}, {})
    for name in os.listdir("/proc"):  # noqa: PTH208 (names, not paths: there are many)
        if not name.isdecimal():
            continue
        try:
            output = os.readlink(f"/proc/{name}/fd/1")  # noqa: PTH115
        except OSError:  # gone, or not ours
            continue
        if output.startswith(logs) and (log := _LOG.fullmatch(output[len(logs) :])):
            process = process_id(int(name))
            if process is not None:
                kind = found.agents if log[1] == "agent" else found.ranks
                kind[int(log[2])] = process
    return found
