"""What the engines slurm and kubernetes start on nodes, and who leads a run that has agents.

    python -m meshwright.control.engines.attempt_process lead FOLDER [--once]
    python -m meshwright.control.engines.attempt_process agent FOLDER [--first=N]

`lead` trains, or conducts the agents of a run that survives; it waits for another that does so, or
with `--once` leaves it to that one. `agent` is one node of such a run: which, Slurm says, or the
index of its pod among those from number N on.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.opening import StoreAt
from meshwright.conduct.hosts import HOSTS_VARIABLE
from meshwright.conduct.rundir import ADDRESS_FILE, living_agents
from meshwright.control.engines.attempt_folder import LEAD, Folder, Order
from meshwright.plan.job import load_job

_POLL_S = 0.1
_ASKED_S = 0.25  # how often it is looked whether somebody wants an end


def main(arguments: list[str]) -> int:
    """The exit code of what was run."""
    role, folder, options = arguments[0], Folder(Path(arguments[1])), arguments[2:]
    order = folder.order()
    if order is None:
        print(f"{folder.path}: there is no order", file=sys.stderr)  # noqa: T201 (Slurm's log)
        return 2
    if role == LEAD:
        return _lead(folder, order, once="--once" in options)
    first = next((int(o.partition("=")[2]) for o in options if o.startswith("--first=")), 0)
    return _be_node(folder, order, _number(order, first))


def _number(order: Order, first: int) -> int:
    """Which node of the run this is."""
    if (index := os.environ.get("JOB_COMPLETION_INDEX")) is not None:
        return first + int(index)
    return order.nodes.index(os.environ["SLURMD_NODENAME"])


def _lead(folder: Folder, order: Order, once: bool) -> int:
    """A second leader finds, once the first has ended by its own word, that nothing is left."""
    lock = folder.lock(LEAD, wait=not once)
    if lock is None or folder.marked(LEAD, order.attempt, "ended"):
        return 0
    folder.mark(LEAD, order.attempt, "begun", host=socket.gethostname(), pid=os.getpid())

    def asked() -> tuple[bool, bool]:
        stop, kill = (folder.marked(LEAD, order.attempt, what) for what in ("stop", "kill"))
        return stop, kill

    code = _run(leading(order), lock, asked)
    folder.mark(LEAD, order.attempt, "ended", code=code)
    return code


def leading(order: Order) -> list[str]:
    """The command that begins or goes on with the run of an order."""
    run = Path(order.run_dir)
    words = [order.python, "-m", "meshwright.cli.main", "train"]
    nodes = ["--nodes-here", "none"] if order.survives else []
    begun = (run / "events.jsonl").is_file()
    if begun and (living_agents(run) or _saved(run)):
        return [*words, str(run), "--resume", *nodes]
    if begun:  # nothing of it was ever saved
        run.rename(run.with_name(f"{run.name}.before-{order.attempt}-{time.time_ns()}"))
    size = ["-o", f"cluster.nodes={len(order.nodes)}"] if order.survives else []
    return [*words, order.job_file, "--run-dir", str(run), *nodes, *size]


def _saved(run: Path) -> bool:
    """Whether there is a commit to go on from. One that cannot be read is one: the trainer says
    what is wrong with it."""
    section = load_job(run / "job.toml").checkpoint
    address = section.store or str((run / "checkpoints").resolve())
    try:
        return StoreAt(address, section.branch, section.encrypt, section.replica).head() is not None
    except CheckpointError:
        return True


def _be_node(folder: Folder, order: Order, number: int) -> int:
    """The agent of a node. It waits for a conductor, and for what was there before it."""
    name = order.nodes[number]
    part = f"node-{name}"
    log = os.open(folder.path / f"{part}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)  # Slurm's own way of it ends with the node that the job was begun on
    os.dup2(log, 2)
    lock = folder.lock(part, wait=True)
    assert lock is not None  # it was waited for
    folder.mark(part, order.attempt, "begun", host=socket.gethostname(), pid=os.getpid())
    run = Path(order.run_dir)
    while not (folder.marked(LEAD, order.attempt, "begun") and (run / ADDRESS_FILE).is_file()):
        if folder.marked(LEAD, order.attempt, "ended"):
            return 0
        time.sleep(_POLL_S)
    if order.addresses:
        os.environ.setdefault(HOSTS_VARIABLE, order.addresses[name])
    words = [order.python, "-m", "meshwright.cli.main", "job", "agent", str(run)]
    return _run([*words, "--node", str(number)], lock, lambda: (False, False))


def _run(words: list[str], lock: int, asked: Callable[[], tuple[bool, bool]]) -> int:
    """Run it with the lock; `asked` says whether it is to save and end, and whether to end at once.
    What Slurm sends to all processes of a job it gets by itself."""
    with subprocess.Popen(words, pass_fds=(lock,), stdin=subprocess.DEVNULL) as child:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # we end when it does
        told = False
        while True:
            try:
                return child.wait(_ASKED_S)
            except subprocess.TimeoutExpired:
                stop, kill = asked()
            if kill:
                child.kill()
            elif stop and not told:
                told = True
                child.send_signal(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
