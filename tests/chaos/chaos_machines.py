"""A run on machines in small: an agent on each, and the conductor on the first or one of its own.

All are forked from the process of the tests, which has imported the trainer and has no threads.
"""

from __future__ import annotations

import os
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from meshwright.conduct import agent
from meshwright.conduct.agent import Agent, Home
from meshwright.conduct.fleet import Fleet, _Agent
from meshwright.conduct.hosts import HOSTS_VARIABLE
from meshwright.conduct.muster import Muster
from meshwright.conduct.processes import read_process
from meshwright.conduct.protocol import die_with_parent
from meshwright.conduct.rundir import ADDRESS_FILE, SECRET_FILE, RunDir
from meshwright.conduct.surviving import run
from meshwright.plan.job import Job

_BOUND_S = 30.0


class Cables(Protocol):
    """What the machines are connected by."""

    def enter(self, machine: int) -> tuple[str, ...]:
        """Move this process to a machine; its addresses."""


class Conducted:
    """The process of the conductor, which is `at` a machine; `ended` gives its exit status. It
    starts the agents, unless they are `hired` or to be adopted. A context manager."""

    def __init__(
        self,
        cables: Cables,
        folder: Path,
        args: dict[str, Any],
        at: int = 0,
        hired: bool = False,
        adopt: bool = False,
    ) -> None:
        log = folder.with_suffix(".log")
        self.pid = _fork(cables, at, log, partial(_run, cables, folder, args, hired, adopt))
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
        with suppress(ProcessLookupError):
            os.kill(self.pid, 9)
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)


class Outpost:
    """The agent of `node` on the machine of that number, started by itself; it does not end with
    its conductor. A context manager."""

    def __init__(self, cables: Cables, folder: Path, node: int, lease_s: float) -> None:
        home = Home(node, str(folder), (folder / SECRET_FILE).read_text(), lease_s)

        def work() -> None:
            # Process numbers say nothing elsewhere.
            vars(agent)["this_machine"] = lambda: f"machine {node}"
            Agent(home).serve()

        self.pid = _fork(cables, node, _log_of(home), work)

    def members(self) -> list[tuple[int, str]]:
        """Process number and state of each member."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        found = [(int(pid), read_process(int(pid))) for pid in children]
        return [(pid, process.state) for pid, process in found if process is not None]

    def kill(self) -> None:
        """The machine is lost, as far as its agent and members go."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)

    def __enter__(self) -> Outpost:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextmanager
def hired(cables: Cables, folder: Path, machines: int, lease_s: float) -> Iterator[list[Outpost]]:
    """Outposts on the machines 0, 1, ..., once there is a conductor."""
    deadline_s = time.monotonic() + _BOUND_S
    while not (folder / ADDRESS_FILE).exists():
        assert time.monotonic() < deadline_s, "there is no conductor"
        time.sleep(0.01)
    with ExitStack() as stack:
        outposts = (Outpost(cables, folder, node, lease_s) for node in range(machines))
        yield [stack.enter_context(outpost) for outpost in outposts]


def _log_of(home: Home) -> Path:
    return Path(home.run) / "logs" / f"agent-{home.node}.log"


class _Machines(Fleet):
    """The agent of each node is on the machine of that number; none is started twice."""

    cables: Cables

    def spawn(self, node: int, lease_s: float) -> None:
        """See `Fleet`."""
        if node in self._agents:
            return
        home = Home(node, str(self._run), self._secret, lease_s)
        pid = _fork(self.cables, node, _log_of(home), lambda: Agent(home).serve())
        self._agents[node] = _Agent(pid, os.pidfd_open(pid))


def _run(cables: Cables, folder: Path, args: dict[str, Any], hired: bool, adopt: bool) -> None:
    muster = Muster(Job.model_validate(args["job"]))
    entry = "meshwright.train.worker:main"
    fleet = Fleet("json", frozenset()) if hired or adopt else _Machines("json")
    if isinstance(fleet, _Machines):
        fleet.cables = cables
    with fleet, RunDir.open_existing(folder) if adopt else RunDir.create_at(folder) as rundir:
        end = run(fleet, rundir, muster, entry, args, lambda _: None, lambda: 0, adopt=adopt)
        assert end.error is None, end


def _fork(cables: Cables, machine: int, log: Path, work: Callable[[], object]) -> int:
    pid = os.fork()
    if not pid:
        _be(cables, machine, log, work)
    return pid


def _be(cables: Cables, machine: int, log: Path, work: Callable[[], object]) -> NoReturn:
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
