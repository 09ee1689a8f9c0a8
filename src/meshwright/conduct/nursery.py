"""A warm process that forks agents: `python -m meshwright.conduct.nursery`.

It has imported what workers need, and so have the agents it forks and the workers that they fork:
one import for all. It ends with the conductor; its agents go on without both.

Requests: `{"op": "spawn", ...}` with the fields of `agent.Home`, `{"op": "quit"}`. Reports:
`{"event": "warm"}`, `{"event": "spawned", "node", "pid"}`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from meshwright.conduct.agent import Agent, Home
from meshwright.conduct.forking import require_single_thread
from meshwright.conduct.protocol import LineBuffer, die_with_parent, encode


def serve(control: socket.socket) -> None:
    """Fork agents until told to quit or the parent is gone."""
    lines = LineBuffer()
    while data := control.recv(1 << 16):
        for line in lines.feed(data):
            request: dict[str, Any] = json.loads(line)
            if request.pop("op") == "quit":
                return
            home = Home(**request)
            pid = os.fork()
            if pid == 0:
                _be_agent(control, home)
            control.sendall(encode({"event": "spawned", "node": home.node, "pid": pid}))


def _be_agent(control: socket.socket, home: Home) -> NoReturn:
    code = 1
    try:
        os.setsid()
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = Path(home.run) / "logs" / f"agent-{home.node}.log"
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        Agent(home).serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Import, say that we are warm, serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preload", required=True, help="module to import before any fork")
    parser.add_argument("--control-fd", type=int, required=True, help="socket to the parent")
    options = parser.parse_args()
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # dead agents are reaped by the kernel
    importlib.import_module(options.preload)
    require_single_thread(options.preload)
    # What lives now lives for good: keep the collector from touching, and so copying, its pages.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=options.control_fd) as control, contextlib.suppress(ConnectionError):
        control.sendall(encode({"event": "warm"}))
        serve(control)


if __name__ == "__main__":
    main()
