"""A run on two machines in small: the conductor on the first, and an agent on each.

All are forked from the process of the tests, which has imported the trainer and has no threads.
"""

from __future__ import annotations

import os
import select
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from chaos_network import Network

from meshwright.conduct.agent import Agent, Home
from meshwright.conduct.fleet import Fleet, _Agent
from meshwright.conduct.hosts import HOSTS_VARIABLE
from meshwright.conduct.muster import Muster
from meshwright.conduct.protocol import die_with_parent
from meshwright.conduct.rundir import RunDir
from meshwright.conduct.surviving import run
from meshwright.plan.job import Job


class Conducted:
    """The process of the conductor; `ended` gives its exit status. A context manager."""

    def __init__(self, cables: Network, folder: Path, args: dict[str, Any]) -> None:
        self.pid = _fork(cables, 0, folder.with_suffix(".log"), lambda: _run(cables, folder, args))
        self._pidfd = os.pidfd_open(self.pid)

    def ended(self, timeout_s: float) -> int | None:
        """None while it runs, waiting up to `timeout_s`."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(timeout_s * 1e3):
            return None
        status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        return None if status is None else status.si_status

    def __enter__(self) -> Conducted:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, 9)
        os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)


class _Machines(Fleet):
    """The agent of each node is on the machine of that number; none is started twice."""

    cables: Network

    def spawn(self, node: int, lease_s: float) -> None:
        """See `Fleet`."""
        if node in self._agents:
            return
        home = Home(node, str(self._run), self._secret, lease_s)
        log = self._run / "logs" / f"agent-{node}.log"
        pid = _fork(self.cables, node, log, lambda: Agent(home).serve())
        self._agents[node] = _Agent(pid, os.pidfd_open(pid))


def _run(cables: Network, folder: Path, args: dict[str, Any]) -> None:
    muster = Muster(Job.model_validate(args["job"]))
    entry = "meshwright.train.worker:main"
    fleet = _Machines("json")
    fleet.cables = cables
    with fleet, RunDir.create_at(folder) as rundir:
        end = run(fleet, rundir, muster, entry, args, lambda _: None, lambda: 0)
        assert end.error is None, end


def _fork(cables: Network, machine: int, log: Path, work: Callable[[], object]) -> int:
    pid = os.fork()
    if not pid:
        _be(cables, machine, log, work)
    return pid


def _be(cables: Network, machine: int, log: Path, work: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        die_with_parent()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ[HOSTS_VARIABLE] = ",".join(cables.enter(machine))
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
