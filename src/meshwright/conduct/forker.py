"""A warm process that becomes a launcher or a nursery: `python -m meshwright.conduct.forker`.

It imports what workers need before it is known whether the run survives losses. What it is first
asked for says so: `spawn` is for a nursery, all else for a launcher (see there).
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

from meshwright.conduct.forking import require_single_thread
from meshwright.conduct.launcher import Launcher
from meshwright.conduct.nursery import serve
from meshwright.conduct.protocol import die_with_parent, encode

_HEAD = 1 << 12  # of a request, which names what is asked for first


def _asks_for_agents(control: socket.socket) -> bool:
    """Whether the first request, which stays where it is, is one to a nursery."""
    head = control.recv(_HEAD, socket.MSG_PEEK)
    return head.startswith(json.dumps({"op": "spawn"}, separators=(",", ":")).encode()[:-1])


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
        if _asks_for_agents(control):
            os.close(options.event_fd)  # agents would hold it open, and their members have another
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # dead agents are reaped by the kernel
            serve(control)
        else:
            Launcher(control, options.event_fd).serve()


if __name__ == "__main__":
    main()
