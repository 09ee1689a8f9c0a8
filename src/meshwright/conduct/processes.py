"""What the kernel says of a process: its state and its CPU time, out of /proc/PID/stat."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A process at one moment; the letters of `state` are those of proc_pid_stat(5).

    `cpu_s` is of all its threads, in user and kernel mode, in ticks of 10 ms on most systems.
    """

    state: str
    parent: int
    cpu_s: float


def read_process(pid: int) -> Process | None:
    """The process `pid`, or None if there is none; "Z" is one that is dead and not yet reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # a name may hold anything, brackets too
    return Process(fields[0], int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND)
