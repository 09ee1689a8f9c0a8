"""Whether the kernel has begun to end a process, long before its parent can wait for it."""

from __future__ import annotations

import os

_FLAGS = 6  # of the fields after the name in proc_pid_stat(5), from 0
_PF_EXITING = 0x4  # linux/sched.h; set first thing when a thread ends


def is_exiting(stat_fd: int) -> bool:
    """Of the process whose /proc/PID/stat is open: whether its first thread runs no code any more.

    True as well where the process is gone.
    """
    try:
        text = os.pread(stat_fd, 1024, 0)
    except ProcessLookupError:
        return True
    fields = text.rpartition(b")")[2].split()  # a name may hold anything, brackets too
    return bool(int(fields[_FLAGS]) & _PF_EXITING)
