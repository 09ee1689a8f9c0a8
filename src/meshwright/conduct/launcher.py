"""A warm process that forks workers: `python -m meshwright.conduct.launcher`.

It imports what the workers need once, so that a worker starts in the time of a fork instead of
that of an import. It must hold no thread while it forks: a lock held by a thread that the child
does not inherit would never be released. Hence one selector loop, children watched by pidfd, and
`OMP_NUM_THREADS` and its like set to 1 by the parent before this process begins.

No worker outlives the launcher, and the launcher does not outlive its parent.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import mmap
import os
import re
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from meshwright.base.errors import RunError
from meshwright.base.events import WorkerContext
from meshwright.conduct.protocol import Exit, LineBuffer, die_with_parent, encode, log_path

Entry = Callable[[WorkerContext], object]

# Written by a worker into memory shared with the launcher as its last act: the Unix time at which
# its entry point ended (0: it never did), whether it returned rather than raised, and whether it
# raised because a peer was lost.
_END = struct.Struct("d??")

# How the loss of a peer reads in the words of the system, and of gloo and its store (torch 2.13),
# which raise RuntimeError for it.
_PEER_LOST = re.compile("closed by peer|reset by peer|Broken pipe|Timed out waiting", re.IGNORECASE)


@dataclass(frozen=True)
class _Launch:
    """One launch as each worker sees it."""

    entry: Entry
    world: int
    log_dir: Path
    args: dict[str, Any]
    store: socket.socket
    ends: mmap.mmap


@dataclass(frozen=True)
class _Worker:
    rank: int
    pid: int
    pidfd: int


class Launcher:
    """Serves one parent: one launch at a time, any number one after another."""

    def __init__(self, control: socket.socket, event_fd: int) -> None:
        self._control = control
        self._event_fd = event_fd
        self._pid = os.getpid()
        self._workers: dict[int, _Worker] = {}
        self._ends = mmap.mmap(-1, _END.size)
        # poll() rather than epoll: it holds no descriptor that workers would share.
        self._selector = selectors.PollSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> None:
        """Obey until told to quit or the parent is gone; no worker is left then."""
        lines = LineBuffer()
        try:
            while True:
                ready = [key.data for key, _ in self._selector.select()]
                for worker in filter(None, ready):
                    self._report_exit(worker)
                if None in ready:
                    data = self._control.recv(1 << 16)
                    requests = [json.loads(line) for line in lines.feed(data)]
                    if not data or not all(self._obey(request) for request in requests):
                        return
        finally:
            self._end_all()

    def _obey(self, request: dict[str, Any]) -> bool:
        """Carry out one request; false for `quit`."""
        if request["op"] == "launch":
            self._launch(request)
        elif request["op"] == "stop":
            self._signal_all(signal.Signals[request["signal"]])
        return bool(request["op"] != "quit")

    def _say(self, event: str, **fields: Any) -> None:
        self._control.sendall(encode({"event": event, **fields}))

    def _launch(self, request: dict[str, Any]) -> None:
        if self._workers:
            self._say("refused", error=f"{len(self._workers)} workers of a launch still run")
            return
        try:
            entry = _resolve(request["entry"])
            require_single_thread(request["entry"])
            self._fork_all(entry, request)
        except Exception as error:
            traceback.print_exc()
            self._end_all()
            self._say("refused", error=f"{type(error).__name__}: {error}")
        else:
            self._say("launched", pids=[worker.pid for worker in self._workers.values()])

    def _fork_all(self, entry: Entry, request: dict[str, Any]) -> None:
        world, log_dir = request["world"], Path(request["log_dir"])
        self._ends = mmap.mmap(-1, world * _END.size)
        # Listening before anyone is forked: no rank can come too early to its rendezvous.
        with socket.create_server(("127.0.0.1", 0), backlog=max(128, 2 * world)) as store:
            launch = _Launch(entry, world, log_dir, request["args"], store, self._ends)
            pids: list[int] = []
            try:
                for rank in range(world):
                    pids.append(self._fork(rank, launch))
            finally:
                # After the last fork: no worker inherits the pidfd of another.
                for rank, pid in enumerate(pids):
                    self._watch(_Worker(rank, pid, os.pidfd_open(pid)))

    def _fork(self, rank: int, launch: _Launch) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._be_worker(rank, launch)
        return pid

    def _watch(self, worker: _Worker) -> None:
        self._workers[worker.rank] = worker
        self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)

    def _reap(self, worker: _Worker) -> tuple[int | None, int | None]:
        """Exit code or signal of a worker, which is forgotten; waits until it is dead."""
        status = os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED)
        assert status is not None  # only WNOHANG may give None
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        del self._workers[worker.rank]
        by_itself = status.si_code == os.CLD_EXITED
        return (status.si_status, None) if by_itself else (None, status.si_status)

    def _report_exit(self, worker: _Worker) -> None:
        seen_ts = time.time()
        code, number = self._reap(worker)
        ended_ts, returned, peer_lost = _END.unpack_from(self._ends, worker.rank * _END.size)
        end = Exit(worker.rank, worker.pid, code, number, returned, ended_ts or seen_ts, peer_lost)
        self._say("exit", **asdict(end))

    def _end_all(self) -> None:
        """Kill every worker and wait for it; nothing is reported."""
        self._signal_all(signal.SIGKILL)
        for worker in list(self._workers.values()):
            self._reap(worker)

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, number)

    def _be_worker(self, rank: int, launch: _Launch) -> NoReturn:
        """The whole life of a forked worker; never returns into the launcher's loop."""
        code = 1
        try:
            die_with_parent()
            if os.getppid() != self._pid:  # the launcher died before the line above
                os._exit(1)
            self._control.close()
            _restore_signals()
            _send_output_to(log_path(launch.log_dir, rank))
            code = _run_entry(self._context(rank, launch), launch)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _context(self, rank: int, launch: _Launch) -> WorkerContext:
        port = launch.store.getsockname()[1]
        store_fd = launch.store.detach() if rank == 0 else None
        launch.store.close()
        return WorkerContext(rank, launch.world, port, store_fd, self._event_fd, launch.args)


def _run_entry(context: WorkerContext, launch: _Launch) -> int:
    """The exit code of the worker, after its end is on record and its traceback in the log."""
    failure: BaseException | None = None
    try:
        launch.entry(context)
    except BaseException as error:
        failure = error
    end = (time.time(), failure is None, failure is not None and _tells_of_peer(failure))
    _END.pack_into(launch.ends, context.rank * _END.size, *end)
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


def _resolve(entry: str) -> Entry:
    module, _, function = entry.partition(":")
    found: Entry = getattr(importlib.import_module(module), function)
    return found


def require_single_thread(imported: str) -> None:
    """Raise RunError if this process has threads, which forked workers would deadlock on."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RunError(f"importing {imported} left {threads} threads; a launcher may have only one")


def main() -> None:
    """Import, say that we are warm, serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preload", required=True, help="module to import before any fork")
    parser.add_argument("--control-fd", type=int, required=True, help="socket to the parent")
    parser.add_argument("--event-fd", type=int, required=True, help="pipe that workers write to")
    options = parser.parse_args()
    die_with_parent()
    importlib.import_module(options.preload)
    require_single_thread(options.preload)
    # What lives now lives for good: keep the collector from touching, and so copying, its pages.
    gc.collect()
    gc.freeze()
    # A connection that breaks means that the parent is gone: nobody is left to tell.
    with socket.socket(fileno=options.control_fd) as control, contextlib.suppress(ConnectionError):
        control.sendall(encode({"event": "warm"}))
        Launcher(control, options.event_fd).serve()


if __name__ == "__main__":
    main()
