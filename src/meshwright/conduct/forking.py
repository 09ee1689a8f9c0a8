"""What a process that was forked to be a worker does, from its first act to its last."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import mmap
import os
import re
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from meshwright.base.errors import RunError
from meshwright.base.events import WorkerContext
from meshwright.conduct.protocol import die_with_parent

Entry = Callable[[WorkerContext], object]

# Written by a worker into memory shared with the launcher as its last act: the Unix time at which
# its entry point ended (0: it never did), whether it returned rather than raised, and whether it
# raised because a peer was lost.
_END = struct.Struct("d??")

# How the loss of a peer reads in the words of the system, and of gloo and its store (torch 2.13),
# which raise RuntimeError for it.
_PEER_LOST = re.compile("closed by peer|reset by peer|Broken pipe|Timed out waiting", re.IGNORECASE)


class Ends:
    """How workers ended, in memory that they share with the process that forked them."""

    def __init__(self, workers: int) -> None:
        self._memory = mmap.mmap(-1, workers * _END.size)

    def write(self, index: int, failure: BaseException | None) -> None:
        """The last act of worker `index`."""
        lost_peer = failure is not None and _tells_of_peer(failure)
        _END.pack_into(self._memory, index * _END.size, time.time(), failure is None, lost_peer)

    def read(self, index: int) -> tuple[float, bool, bool]:
        """Unix time at which the entry point ended (0: it never did), whether it returned, and
        whether it raised because a peer was lost."""
        ts, returned, peer_lost = _END.unpack_from(self._memory, index * _END.size)
        return ts, returned, peer_lost


def become_worker(
    parent: int,
    log: Path,
    ends: Ends,
    index: int,
    entry: Entry,
    prepare: Callable[[], WorkerContext],
) -> NoReturn:
    """The whole life of a forked worker; never returns into the loop of `parent`, its forker.

    `prepare` lets go of what the worker inherited and must not hold, and makes its context.
    """
    code = 1
    try:
        die_with_parent()
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        context = prepare()
        _restore_signals()
        _send_output_to(log)
        code = _run_entry(entry, context, ends, index)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run_entry(entry: Entry, context: WorkerContext, ends: Ends, index: int) -> int:
    """The exit code of the worker, after its end is on record and its traceback in the log."""
    failure: BaseException | None = None
    try:
        entry(context)
    except BaseException as error:
        failure = error
    ends.write(index, failure)
    if failure is None:
        return 0
    traceback.print_exception(failure)
    if "\n" in str(failure):  # the last line of a log is what people are shown
        sys.stderr.write(f"{type(failure).__name__}: {str(failure).splitlines()[0]}\n")
    if isinstance(failure, SystemExit) and not isinstance(failure.code, str):
        return int(failure.code or 0)
    return 1


def _tells_of_peer(failure: BaseException) -> bool:
    """Whether the exception that began it all, before any raised while handling it, is a loss."""
    while (earlier := failure.__cause__ or failure.__context__) is not None:
        failure = earlier
    return isinstance(failure, ConnectionError) or bool(_PEER_LOST.search(str(failure)))


def _restore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _send_output_to(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Line by line, so that a killed worker leaves what it printed.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()


def resolve(entry: str) -> Entry:
    module, _, function = entry.partition(":")
    found: Entry = getattr(importlib.import_module(module), function)
    return found


def require_single_thread(imported: str) -> None:
    """Raise RunError if this process has threads, which forked workers would deadlock on."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RunError(f"importing {imported} left {threads} threads; a launcher may have only one")


def reap(pidfd: int) -> tuple[int | None, int | None]:
    """Exit code or signal of a child, whose descriptor is closed; waits until it is dead."""
    status = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    assert status is not None  # only WNOHANG may give None
    os.close(pidfd)
    by_itself = status.si_code == os.CLD_EXITED
    return (status.si_status, None) if by_itself else (None, status.si_status)
