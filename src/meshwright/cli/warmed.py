"""A conductor that waits for its job with all imports done: `python -m meshwright.cli.warmed`.

On standard input, a socket, comes one message: a job, with the descriptors of its launch file,
which is locked, and of its log. Before that the end of the line is the end of this process; after
it nobody is needed any more. It does what `meshwright train` does, in a session of its own.

SIGUSR1 asks it to save and end, as Ctrl-C does, however often it comes: Ctrl-C for a second time
ends ranks that have not saved.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from meshwright.base.errors import MeshwrightError
from meshwright.conduct.fleet import Fleet
from meshwright.conduct.local import LocalEngine
from meshwright.control.engines import launch
from meshwright.control.engines.runs import SAVED_AND_ENDED, agents_live, has_begun
from meshwright.control.engines.warm import GENTLY

if TYPE_CHECKING:
    from meshwright.plan.job import Job

WORKER = "meshwright.train.worker"  # as in cli.session, which takes long to import
_MESSAGE_BYTES = 1 << 16
_CAP_SYS_NICE = 23  # linux/capability.h
_NICE = 5  # a tenth of a run's time for less than a minute; 19 would never get there beside one


@dataclass(frozen=True)
class Order:
    """What is to be conducted."""

    run_dir: Path
    job_file: Path
    lock: int  # descriptors
    log: int


class _Once:
    """Turns the first SIGUSR1 into one Ctrl-C, of the run or as soon as there is one."""

    def __init__(self) -> None:
        self._asked = self._begun = False
        signal.signal(signal.SIGUSR1, self._take)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        first, self._asked = not self._asked, True
        if first and self._begun:
            signal.raise_signal(signal.SIGINT)

    def begin(self) -> None:
        """Raises KeyboardInterrupt if it was asked for before."""
        self._begun = True
        if self._asked:
            raise KeyboardInterrupt


class _Pace:
    """Warms up behind runs until SIGCONT says that there is a job: imports that are under way
    are waited for by somebody then. Before it is handled SIGCONT does nothing."""

    def __init__(self) -> None:
        self._hurried = self._slow = False
        self._pids = [0]  # this process
        signal.signal(signal.SIGCONT, lambda *_: self.hurry())

    def slow(self) -> None:
        """Unless there is a job already."""
        if select.select([0], [], [], 0)[0]:
            return
        self._slow = True
        os.nice(_NICE)
        if self._hurried:  # between the two lines above
            self.hurry()

    def go_with(self, pid: int) -> None:
        """Another process, which was started at this pace."""
        self._pids.append(pid)
        if self._hurried:
            self.hurry()

    def hurry(self) -> None:
        """As fast as others, from now on."""
        self._hurried = True
        for pid in self._pids if self._slow else ():
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, pid, 0)


def main() -> NoReturn:
    """Warm up, wait, train."""
    once = _Once()
    pace = _Pace()
    if GENTLY in sys.argv[1:] and _can_hurry():
        pace.slow()
    with LocalEngine.start_either(WORKER) as engine:
        pace.go_with(engine.pid)
        import meshwright.cli.app  # noqa: F401 (while the engine imports torch)

        with socket.socket(fileno=os.dup(0)) as line:
            order = _receive(line)
        if order is None:
            sys.exit(0)
        pace.hurry()
        code = _conduct(order, engine, once)
    sys.exit(code)


def _receive(line: socket.socket) -> Order | None:
    message, descriptors, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 2)
    if not message:
        return None
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # the lock lives as long as this process alone
    job: dict[str, Any] = json.loads(message)
    lock, log = descriptors
    return Order(Path(job["run_dir"]), Path(job["job_file"]), lock, log)


def _conduct(order: Order, engine: LocalEngine, once: _Once) -> int:
    """Do it; the exit code, which is in the launch file by then."""
    null = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((null, 0), (order.log, 1), (order.log, 2)):
        os.dup2(ours, theirs)
    os.close(null)
    os.close(order.log)
    os.chdir(order.run_dir.parent)
    goes_on = _goes_on(order)
    found = launch.read(order.run_dir)
    assert found is not None  # it was written before the lock was given away
    if not found.taken:
        events = order.run_dir / "events.jsonl"
        size = events.stat().st_size if goes_on and events.exists() else 0
        found = replace(found, taken=True, events=size, log=os.fstat(1).st_size)
        launch.write(order.lock, found)
    code = _train(order, engine, once, goes_on)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    launch.write(order.lock, replace(found, code=code))
    return code


def _goes_on(order: Order) -> bool:
    """Whether there is a run to go on with. What was lost before it was saved is kept aside."""
    from meshwright.cli.commits import store_of_run

    run = order.run_dir
    if not has_begun(run):
        return False
    if agents_live(run):
        return True
    try:
        if (run / "job.toml").is_file() and store_of_run(run).head() is not None:
            return True
    except (MeshwrightError, OSError):  # cannot be looked into: `--resume` will say why
        return True
    number = 1
    while (aside := run.with_name(f"{run.name}.lost-{number}")).exists():
        number += 1
    run.rename(aside)
    return False


def _train(order: Order, engine: LocalEngine, once: _Once, goes_on: bool) -> int:
    from meshwright.cli.app import exit_code
    from meshwright.cli.train import train_by

    def engine_of(job: Job, here: frozenset[int] | None) -> LocalEngine | Fleet:
        return Fleet(WORKER, here, engine) if job.resilience.survives else engine

    def command() -> int:
        once.begin()
        if goes_on:
            return train_by(engine_of, order.run_dir, resume=True)
        return train_by(engine_of, order.job_file, run_dir=order.run_dir)

    try:
        return exit_code(command)
    except KeyboardInterrupt:
        return SAVED_AND_ENDED
    except BaseException:
        traceback.print_exc()
        return 1


def _can_hurry() -> bool:
    """Whether this process may go back to a higher priority, which needs a capability."""
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff"))
    return bool(int(effective.split()[1], 16) >> _CAP_SYS_NICE & 1)


if __name__ == "__main__":
    main()
