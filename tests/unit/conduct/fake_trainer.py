"""Entry points that stand in for the trainer: no torch, so that a launcher is warm at once.

What a worker does is told in `args`: `steps`, and `acts`, which maps a rank to
`{"at": step, or "stop" for after SIGTERM, "do": what}`. Every wait is bounded by `LIMIT_S`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from meshwright.base.events import EventWriter, Kind, WorkerContext

LIMIT_S = 60.0


def steps(context: WorkerContext) -> None:
    """Say each step, act where told, and otherwise keep in step with nobody."""
    say = EventWriter(context.event_fd, context.rank)
    say.emit(Kind.RANK_READY)
    for step in range(1, context.args.get("steps", 3) + 1):
        say.emit(Kind.PROGRESS, step=step)
        _act(context, step)
        if context.rank == 0:
            say.emit(Kind.METRICS, step=step, loss=1.0 / step)


def until_stopped(context: WorkerContext) -> None:
    """Step until SIGTERM, then say that all is saved; `acts` may spoil that."""
    stopped: list[int] = []
    if "deaf" not in context.args:
        signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    say = EventWriter(context.event_fd, context.rank)
    say.emit(Kind.RANK_READY)
    _act(context, 0)
    while not stopped:
        time.sleep(0.002)  # SIGTERM ends it at once
        _check_time()
    _act(context, "stop")
    say.emit(Kind.RUN_INTERRUPTED, step=7)


def cascade(context: WorkerContext) -> None:
    """Every rank holds a connection to rank 0, and fails when its peer is gone.

    A rank that fails closes its connections, and needs `slow_s` before it is gone itself.
    """
    with ExitStack() as stack:
        if str(context.rank) in context.args["acts"]:
            stack.callback(time.sleep, context.args.get("slow_s", 0.0))
        peers = _connect(context, stack)
        for step in range(1, 9):
            EventWriter(context.event_fd, context.rank).emit(Kind.PROGRESS, step=step)
            for peer in peers:
                peer.sendall(b"x")
            _act(context, step)
            for peer in peers:
                if not peer.recv(1):
                    raise RuntimeError("gloo/pair.cc: Connection closed by peer")


def describe_self(context: WorkerContext) -> None:
    """What a worker was given and what it holds, to its log."""
    if context.store_fd is not None:
        with socket.socket(fileno=os.dup(context.store_fd)) as listener:
            assert listener.getsockname() == ("127.0.0.1", context.store_port)
    open_fds = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    open_fds = {fd for fd in open_fds if Path(f"/proc/self/fd/{fd}").is_symlink()}
    extra = open_fds - {0, 1, 2, context.event_fd, context.store_fd}
    default = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    said = {
        "extra_fds": sorted(extra),
        "store": context.store_fd is not None,
        "args": context.args,
        "world": context.world,
        "default_signals": default == [signal.SIG_DFL] * 2,
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "omp": os.environ["OMP_NUM_THREADS"],
        "gloo": os.environ["GLOO_SOCKET_IFNAME"],
    }
    sys.stdout.write(json.dumps(said))


def wait(context: WorkerContext) -> None:
    """Say that we are ready, and wait to be killed."""
    EventWriter(context.event_fd, context.rank).emit(Kind.RANK_READY)
    _wait_forever()


def _act(context: WorkerContext, moment: int | str) -> None:
    act = context.args.get("acts", {}).get(str(context.rank))
    if act is None or act["at"] != moment:
        return
    match act["do"]:
        case "raise":
            raise ValueError(f"bad value on rank {context.rank}")
        case "raise lines":
            raise ValueError("first line\nsecond line\n")
        case "sys.exit":
            sys.exit(0)
        case "os._exit":
            os._exit(int(act.get("code", 0)))
        case "say nonsense":
            os.write(context.event_fd, b'not json\n{"kind":"no such","rank":1}\n\n[]\n')
            EventWriter(context.event_fd, context.rank).emit(
                Kind.RUN_FAILED, error="not mine to say"
            )
        case "wait":
            _wait_forever()
        case name:
            sys.stdout.write("about to die\n")
            os.kill(os.getpid(), signal.Signals[name])
            _wait_forever()  # delivery may take a moment


def _connect(context: WorkerContext, stack: ExitStack) -> list[socket.socket]:
    if context.store_fd is None:
        address = ("127.0.0.1", context.store_port)
        return [stack.enter_context(socket.create_connection(address, timeout=LIMIT_S))]
    listener = stack.enter_context(socket.socket(fileno=context.store_fd))
    listener.settimeout(LIMIT_S)
    peers = [stack.enter_context(listener.accept()[0]) for _ in range(context.world - 1)]
    for peer in peers:
        peer.settimeout(LIMIT_S)
    return peers


_BEGUN_S = time.monotonic()


def _check_time() -> None:
    if time.monotonic() - _BEGUN_S > LIMIT_S:
        raise TimeoutError("nobody ended this worker")


def _wait_forever() -> None:
    while True:
        time.sleep(0.05)
        _check_time()
