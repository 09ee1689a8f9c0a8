"""Engine `local`: chips are processes of this machine, and a node is some of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.base.errors import ConfigError, RunError
from meshwright.control.engines import launch
from meshwright.control.engines.engine import (
    ClusterOrder,
    ClusterReport,
    DeployStep,
    Fault,
    NodeReport,
    RunOrder,
    RunReport,
)
from meshwright.control.engines.launch import Launched
from meshwright.control.engines.local_chips import Chips
from meshwright.control.engines.local_deploy import deploy, self_test
from meshwright.control.engines.local_spec import CHIPS_PER_NODE, refuse
from meshwright.control.engines.processes import ProcessId, hands, kill, send
from meshwright.control.engines.runs import (
    CONDUCTOR_GONE,
    SAVED_AND_ENDED,
    Follower,
    Told,
    agents_live,
    complaint,
    end_of,
    state_of,
)
from meshwright.control.engines.warm import Warmer
from meshwright.control.spec import ClusterSpec
from meshwright.control.words import FaultKind, Health, NodeAction, NodeStatus, RunState

_LOCK_S = 0.5  # for a conductor that was killed to be gone
_FAULTS = (FaultKind.CHIP_DEAD, FaultKind.NODE_DOWN)


class LocalProcesses:
    """The engine. It keeps nothing but what is faster to remember than to look up."""

    name = "local"

    def __init__(self) -> None:
        self._warmer = Warmer()
        self._chips = Chips()
        self._followers: dict[Path, Follower] = {}
        self._starting: set[Path] = set()

    # --- clusters

    def refuse(self, spec: ClusterSpec) -> None:
        """As `Engine.refuse`."""
        refuse(spec)

    def chips_per_node(self, spec: ClusterSpec) -> int:
        """Processes that make up a node."""
        return spec.chips_per_node or CHIPS_PER_NODE

    def deploy(self, cluster: ClusterOrder) -> Iterator[DeployStep]:
        """As `Engine.deploy`; every step of it is a measurement."""
        return deploy(cluster)

    def destroy(self, cluster: ClusterOrder) -> None:
        """Kill all runs of it."""
        for run in cluster.runs:
            self.stop(cluster, run, hard=True)

    def observe(self, cluster: ClusterOrder, now_s: float) -> ClusterReport:
        """As `Engine.observe`. Chips are well but for those that a fault was injected into."""
        self._warmer.tend(quiet=not self._starting, gently=bool(cluster.runs))
        sample = self._chips.sample(cluster, now_s)
        return ClusterReport(
            now_s,
            tuple(_report(cluster, node, now_s) for node in range(cluster.node_count)),
            sample,
        )

    def act(self, cluster: ClusterOrder, node: int, action: NodeAction) -> Iterator[DeployStep]:
        """To reboot or to replace is to end what runs there, and the self-test."""
        if action in (NodeAction.DRAIN, NodeAction.RESUME):
            yield DeployStep("ready", f"node {node}: {action}", 1.0)
            return
        if action is not NodeAction.CHECK:
            for run in cluster.runs:
                kill(self._chips.victims(run, node, None))
        yield from self_test(cluster, cluster.chips_per_node)

    # --- faults

    def inject(self, cluster: ClusterOrder, fault: Fault) -> None:
        """Kill the processes that are the chip, or the node; the same ones if asked again."""
        if fault.kind not in _FAULTS:
            raise ConfigError(
                "kind", str(fault.kind), f"engine local can do {' and '.join(_FAULTS)} alone"
            )
        marks = _marks(cluster, fault)
        if not marks.exists():
            chip = None if fault.kind is FaultKind.NODE_DOWN else fault.chip
            victims = [
                v for run in cluster.runs for v in self._chips.victims(run, fault.node, chip)
            ]
            marks.parent.mkdir(parents=True, exist_ok=True)
            partial = marks.with_suffix(".partial")
            partial.write_text(json.dumps([[victim.pid, victim.start] for victim in victims]))
            partial.replace(marks)
        kill(ProcessId(pid, start) for pid, start in json.loads(marks.read_text()))

    def clear(self, cluster: ClusterOrder, fault: Fault) -> None:
        """The chip may be used again; what was killed is dead."""
        _marks(cluster, fault).unlink(missing_ok=True)

    # --- runs

    def start(self, cluster: ClusterOrder, run: RunOrder) -> Mapping[str, Any]:
        """As `Engine.start`. Raises RunError where a later attempt has the run."""
        del cluster
        lock = launch.acquire(run.run_dir)
        found = launch.read(run.run_dir)
        if lock is None and found is not None and found.attempt == run.attempt:
            return _handle(found)
        if found is not None and found.attempt > run.attempt:
            if lock is not None:
                os.close(lock)
            raise RunError(f"{run.run_dir}: attempt {found.attempt} has it by now")
        if lock is None:
            lock, found = _take_over(run, found), None
        try:
            same = found if found is not None and found.attempt == run.attempt else None
            if same is not None and _is_over(same, run.run_dir):
                return _handle(same)
            return self._start(run, same, lock)
        finally:
            os.close(lock)

    def _start(self, run: RunOrder, before: Launched | None, lock: int) -> Mapping[str, Any]:
        """By the conductor that waits. Until it has its job and the lock, nothing has happened."""
        waiting = self._warmer.take()
        log = os.open(launch.log_file(run.run_dir), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            pid, start = waiting.id.pid, waiting.id.start
            launched = Launched(run.attempt, pid, start)
            if before is not None:  # what its agents have said since the first one counts
                launched = replace(before, pid=pid, start=start, code=None, killed=False)
            launch.write(lock, launched)
            job: dict[str, object] = {
                "run_dir": str(run.run_dir.resolve()),
                "job_file": str(run.job_file.resolve()),
            }
            waiting.give(job, [lock, log])
        finally:
            os.close(log)
            self._warmer.forget(waiting)
        self._starting.add(run.run_dir)
        return _handle(launched)

    def look(self, cluster: ClusterOrder, run: RunOrder) -> RunReport:
        """As `Engine.look`."""
        del cluster
        report = self._look(run)
        if report.state is not RunState.STARTING:
            self._starting.discard(run.run_dir)
        return report

    def _look(self, run: RunOrder) -> RunReport:
        held = launch.is_held(run.run_dir)  # before what is read: that is final if nobody holds it
        found = launch.read(run.run_dir)
        if found is None or found.attempt < run.attempt:
            return RunReport(RunState.ABSENT)
        if found.attempt > run.attempt:
            return RunReport(RunState.LOST, f"attempt {found.attempt} has taken its place")
        if not found.taken and found.code is None:
            return RunReport(RunState.STARTING if held else RunState.ABSENT)
        told = self._told(run.run_dir, found)
        if held or agents_live(run.run_dir):
            said = "" if held else CONDUCTOR_GONE
            return RunReport(state_of(told, run.ranks), said, orphaned=not held)
        said = complaint(launch.log_file(run.run_dir), found.log)
        if found.killed:
            return RunReport(RunState.STOPPED, "killed on request")
        return RunReport(*end_of(told, found.code, said))

    def _told(self, run_dir: Path, found: Launched) -> Told:
        follower = self._followers.get(run_dir)
        if follower is None or follower.begin != found.events:
            follower = self._followers[run_dir] = Follower(run_dir, found.events)
        return follower.look()

    def stop(self, cluster: ClusterOrder, run: RunOrder, hard: bool) -> None:
        """As `Engine.stop`. One that has not begun to do anything is killed either way; agents that
        have lost their conductor get one first, and RunError is raised: it can save soon."""
        held = launch.is_held(run.run_dir)
        found = launch.read(run.run_dir)
        if found is None or found.attempt != run.attempt:
            return
        agents = agents_live(run.run_dir)
        if not (held or agents or (not found.taken and found.code is None)):
            return
        if hard or not found.taken:
            _kill_all(run.run_dir, found)
            _mark_killed(run.run_dir, found.attempt)
        elif held:
            send(ProcessId(found.pid, found.start), signal.SIGUSR1)
        else:
            self.start(cluster, run)
            raise RunError(f"{run.run_dir}: its conductor was lost and starts again; then it stops")

    def close(self) -> None:
        """As `Engine.close`."""
        self._warmer.close()


def _is_over(found: Launched, run_dir: Path) -> bool:
    """Whether an attempt is not to be started again: agents that lost their conductor get one."""
    return (found.taken or found.code is not None) and not agents_live(run_dir)


def _take_over(run: RunOrder, earlier: Launched | None) -> int:
    """The lock of a run that an earlier attempt has, which ends. Raises RunError if it does not."""
    if earlier is not None:
        _kill_all(run.run_dir, earlier)
    if (lock := launch.acquire(run.run_dir, _LOCK_S)) is None:
        raise RunError(f"{run.run_dir}: another attempt has it; asked again in a moment")
    return lock


def _handle(found: Launched) -> dict[str, Any]:
    return {"pid": found.pid, "start": found.start}


def _kill_all(run_dir: Path, found: Launched) -> None:
    """Conductor first: it would replace the others."""
    if launch.is_held(run_dir):
        kill([ProcessId(found.pid, found.start)], _LOCK_S)
    kill(hands(run_dir).all)


def _mark_killed(run_dir: Path, attempt: int) -> None:
    """So that nobody takes it for lost, or starts it."""
    if (lock := launch.acquire(run_dir, _LOCK_S)) is None:
        raise RunError(f"{run_dir}: its conductor was killed, and is not gone yet")
    try:
        found = launch.read(run_dir)
        if found is not None and found.attempt == attempt:
            launch.write(lock, replace(found, code=SAVED_AND_ENDED, killed=True))
    finally:
        os.close(lock)


def _marks(cluster: ClusterOrder, fault: Fault) -> Path:
    """Whom a fault has killed, or is about to."""
    return cluster.home / "faults" / f"{fault.id}.json"


def _report(cluster: ClusterOrder, node: int, now_s: float) -> NodeReport:
    faults = [f for f in cluster.faults if f.node == node and _is_on(f, now_s)]
    down = any(fault.kind is FaultKind.NODE_DOWN for fault in faults)
    dead = {fault.chip for fault in faults if fault.kind is FaultKind.CHIP_DEAD}
    all_dead = down or None in dead
    chips = tuple(
        Health.FAILED if all_dead or chip in dead else Health.HEALTHY
        for chip in range(cluster.chips_of(node))
    )
    health = Health.FAILED if all_dead else Health.DEGRADED if dead else Health.HEALTHY
    return NodeReport(
        number=node,
        status=NodeStatus.FAILED if down else NodeStatus.RUNNING,
        health=health,
        chips=chips,
        address="127.0.0.1",
        message=", ".join(f"injected: {fault.kind}" for fault in faults),
    )


def _is_on(fault: Fault, now_s: float) -> bool:
    return fault.since_s <= now_s and (fault.until_s is None or now_s < fault.until_s)
