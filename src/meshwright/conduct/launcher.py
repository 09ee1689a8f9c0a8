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
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.base.events import WorkerContext
from meshwright.conduct.forking import (
    Ends,
    Entry,
    become_worker,
    reap,
    require_single_thread,
    resolve,
)
from meshwright.conduct.protocol import Exit, LineBuffer, die_with_parent, encode, log_path


@dataclass(frozen=True)
class _Launch:
    """One launch as each worker sees it."""

    entry: Entry
    world: int
    log_dir: Path
    args: dict[str, Any]
    store: socket.socket
    ends: Ends


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
        self._ends = Ends(1)
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
            entry = resolve(request["entry"])
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
        self._ends = Ends(world)
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
            log = log_path(launch.log_dir, rank)
            become_worker(
                self._pid, log, launch.ends, rank, launch.entry, lambda: self._context(rank, launch)
            )
        return pid

    def _watch(self, worker: _Worker) -> None:
        self._workers[worker.rank] = worker
        self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)

    def _reap(self, worker: _Worker) -> tuple[int | None, int | None]:
        """Exit code or signal of a worker, which is forgotten; waits until it is dead."""
        self._selector.unregister(worker.pidfd)
        del self._workers[worker.rank]
        return reap(worker.pidfd)

    def _report_exit(self, worker: _Worker) -> None:
        seen_ts = time.time()
        code, number = self._reap(worker)
        ended_ts, returned, peer_lost = self._ends.read(worker.rank)
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

    def _context(self, rank: int, launch: _Launch) -> WorkerContext:
        self._control.close()
        port = launch.store.getsockname()[1]
        store_fd = launch.store.detach() if rank == 0 else None
        launch.store.close()
        return WorkerContext(rank, launch.world, port, store_fd, self._event_fd, launch.args)


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
