"""A node of a run whose conductor is on another machine: starts the agent, and again if it dies.

The machines share the folder of the run, by which they find each other and know its secret.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from meshwright.base.errors import InputError, RunError
from meshwright.conduct.agent import Home
from meshwright.conduct.rundir import SECRET_FILE, is_done, living_agents
from meshwright.conduct.warm import WarmProcess

_POLL_S = 0.1
_ANSWER_S = 30.0
_PAUSES_S = (0.0, 1.0, 4.0, 16.0, 60.0)  # before an agent that has died is started again


def serve(
    run: Path, node: int, preload: str, lease_s: float, stop_requests: Callable[[], int]
) -> bool:
    """Be `node` of `run` until that is over (true), or until asked to stop; then no member is left
    here. `preload` is what agents import before they fork members.

    Raises InputError if the node has an agent, RunError if one dies again and again.
    """
    if node in living_agents(run):
        raise InputError(
            f"{run}: node {node} has an agent already; wait for it to end, or name another node"
        )
    home = Home(node, str(run.resolve()), (run / SECRET_FILE).read_text(), lease_s)
    with WarmProcess("meshwright.conduct.nursery", preload, [], []) as nursery:
        while not nursery.wait_warm(_POLL_S):
            if stop_requests():
                return False
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            answer = nursery.ask({"op": "spawn", **asdict(home)}, "spawned", _ANSWER_S)
            if not _await_end(int(answer["pid"]), stop_requests):
                return False
            if is_done(run, node):
                return True
    log = run / "logs" / f"agent-{node}.log"
    raise RunError(f"the agent of node {node} died {len(_PAUSES_S)} times; log: {log}")


def _await_end(pid: int, stop_requests: Callable[[], int]) -> bool:
    """Wait for the end of an agent; false if it was killed because we are asked to stop."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        while not poller.poll(_POLL_S * 1e3):
            if stop_requests():
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                poller.poll(_ANSWER_S * 1e3)
                return False
    finally:
        os.close(pidfd)
    return True
