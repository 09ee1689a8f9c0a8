"""A cluster that does not exist: a function of what was asked of it and of the time.

Nothing runs for it. What is durable is the order of the service, and in the folder of the cluster
what was done to it (`simulation/deeds.py`); from that any engine, before a crash or after it, works
out the same chips and runs at any moment. `spec.speed` is how many of its seconds are in one of
ours. Physics: `simulation/heat.py`; runs: `simulation/course.py`; both together:
`simulation/world.py`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from meshwright.base.errors import ConfigError, RunError
from meshwright.base.events import Kind
from meshwright.control.engines.engine import (
    ClusterOrder,
    ClusterReport,
    DeployStep,
    Fault,
    RunOrder,
    RunReport,
)
from meshwright.control.engines.simulation.course import Course, Phase
from meshwright.control.engines.simulation.harm import MOST_LOST, SHARES
from meshwright.control.engines.simulation.logbook import Logbook
from meshwright.control.engines.simulation.machine import catalogued
from meshwright.control.engines.simulation.past import chips_of
from meshwright.control.engines.simulation.sample import reports
from meshwright.control.engines.simulation.selftest import SelfTest, deploy_steps, tested
from meshwright.control.engines.simulation.site import Site
from meshwright.control.engines.simulation.telling import tell
from meshwright.control.engines.simulation.work import work_of
from meshwright.control.spec import ClusterSpec
from meshwright.control.words import NodeAction, RunState
from meshwright.plan.describe import describe_plan
from meshwright.plan.job import Job, load_job

REBOOT_S = 0.5  # of ours, however fast a cluster's own time goes
SAME_REBOOT_S = 5.0  # one that is asked for again so soon, as after a crash, is the same
_MOST_PLANNED = 64  # ranks of which a plan is written down: a start shall not take long

_ENDS = {
    Kind.RUN_FINISHED: RunState.FINISHED,
    Kind.RUN_INTERRUPTED: RunState.STOPPED,
    Kind.RUN_FAILED: RunState.FAILED,
}


class SimulatedEngine:
    """Engine `simulated`. `clock` gives seconds since the epoch, `sleep` waits for that clock."""

    name = "simulated"

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._sites: dict[str, Site] = {}
        self._lock = threading.Lock()

    def refuse(self, spec: ClusterSpec) -> None:
        """Raise ConfigError for an instance that is not known, or a number of chips it lacks."""
        catalogued(spec)

    def chips_per_node(self, spec: ClusterSpec) -> int:
        """As asked for, or as the instance has them."""
        return spec.chips_per_node or catalogued(spec).chips_per_node

    def deploy(self, cluster: ClusterOrder) -> Iterator[DeployStep]:
        """Test its chips. Raises RunError naming those that fail."""
        cluster.home.mkdir(parents=True, exist_ok=True)
        yield from deploy_steps(cluster, self._test(cluster, None), cluster.spec.seed)

    def destroy(self, cluster: ClusterOrder) -> None:
        """End all runs."""
        site = self._site(cluster)
        with site.lock:
            if cluster.home.is_dir() and any(d["deed"] == "run" for d in site.deeds.read()):
                site.deeds.add({"deed": "end", "at_s": self._clock()})
                self._record_all(site, cluster, self._clock())

    def observe(self, cluster: ClusterOrder, now_s: float) -> ClusterReport:
        """All chips at `now_s`; runs tell what they have to tell."""
        site = self._site(cluster)
        with site.lock:
            self._record_all(site, cluster, now_s)
            view = site.at(cluster, now_s)
            state = view.chips()
            sample = site.sampler.sample(view.epoch, state)
            return ClusterReport(now_s, reports(cluster, view.epoch, state, view.in_use()), sample)

    def act(self, cluster: ClusterOrder, node: int, action: NodeAction) -> Iterator[DeployStep]:
        """Reboot, replace and check end in a self-test of the node's chips, which RunError tells of
        if they fail; to drain and to resume is up to the service, and needs nothing here."""
        if not 0 <= node < -(-cluster.chips // cluster.chips_per_node):
            raise ConfigError("node", node, "there is no such node in this cluster")
        if action in (NodeAction.DRAIN, NodeAction.RESUME):
            yield DeployStep("ready", f"node {node}: {action}", 1.0)
            return
        if action in (NodeAction.REBOOT, NodeAction.REPLACE):
            replaced = action is NodeAction.REPLACE
            yield DeployStep("initialise", f"node {node}: {action}", 0.1)
            self._sleep(max(0.0, self._begin_anew(cluster, node, replaced) - self._clock()))
        test = self._test(cluster, node)
        yield DeployStep("initialise", f"node {node} answers", 0.3)
        test.present()
        yield from tested(test, 0.3, 0.95)
        yield DeployStep("ready", f"node {node} is sound", 1.0)

    def inject(self, cluster: ClusterOrder, fault: Fault) -> None:
        """Do it. Raises ConfigError for a chip that is not there, or a share that is all of it."""
        count = chips_of(cluster, fault.node)
        if count == 0:
            raise ConfigError("node", fault.node, "there is no such node in this cluster")
        if fault.chip is not None and fault.chip >= count:
            fix = f"node {fault.node} has {count} chips, numbered from 0"
            raise ConfigError("chip", fault.chip, fix)
        if fault.kind in SHARES and fault.severity > MOST_LOST:
            fix = f"is a share of what a chip has; give at most {MOST_LOST:g}"
            raise ConfigError("severity", fault.severity, fix)
        site = self._site(cluster)
        with site.lock:
            if not any(d["deed"] == "fault" and d["id"] == fault.id for d in site.deeds.read()):
                site.deeds.add({"deed": "fault", **asdict(fault)})

    def clear(self, cluster: ClusterOrder, fault: Fault) -> None:
        """Undo it, as of now."""
        site = self._site(cluster)
        with site.lock:
            if not any(d["deed"] == "clear" and d["id"] == fault.id for d in site.deeds.read()):
                at_s = self._clock()
                at_s = at_s if fault.until_s is None else min(at_s, fault.until_s)
                site.deeds.add({"deed": "clear", "id": fault.id, "at_s": at_s})

    def start(self, cluster: ClusterOrder, run: RunOrder) -> Mapping[str, Any]:
        """Start an attempt, or find that it was started. Raises RunError if nobody gets there."""
        site = self._site(cluster)
        with site.lock:
            if site.begun(run) is None:
                self._refuse_hidden(site, cluster, run)
                job = load_job(run.job_file)
                book = site.book(run.run_dir)
                book.refresh()
                _prepare(run, job)
                site.deeds.add(_deed(cluster, run, job, book))
            return {"simulated": True, "job_id": run.job_id, "attempt": run.attempt}

    def look(self, cluster: ClusterOrder, run: RunOrder) -> RunReport:
        """What can be seen of an attempt; it tells what it has to tell, if it can be seen."""
        site, now_s = self._site(cluster), self._clock()
        with site.lock:
            return self._record(site, cluster, run, now_s)

    def stop(self, cluster: ClusterOrder, run: RunOrder, hard: bool) -> None:
        """Ask an attempt to end, once. Raises RunError where nobody gets there."""
        site = self._site(cluster)
        with site.lock:
            if site.begun(run) is None or site.stopped(run, hard):
                return
            self._refuse_hidden(site, cluster, run)
            deed = {"deed": "stop", "job": run.job_id, "attempt": run.attempt}
            site.deeds.add({**deed, "at_s": self._clock(), "hard": hard})

    def close(self) -> None:
        """Nothing runs, so nothing ends."""

    def _site(self, cluster: ClusterOrder) -> Site:
        with self._lock:
            site = self._sites.get(cluster.id)
            if site is None or not site.same(cluster):
                site = self._sites[cluster.id] = Site(cluster)
            return site

    def _test(self, cluster: ClusterOrder, node: int | None) -> SelfTest:
        site = self._site(cluster)
        with site.lock:
            view = site.at(cluster, self._clock())
        machine = view.epoch.state.machine
        which = slice(0, machine.count) if node is None else machine.node(node)
        return SelfTest(machine, view.epoch.harm, which)

    def _begin_anew(self, cluster: ClusterOrder, node: int, replaced: bool) -> float:
        """When the node is there again."""
        site, now_s = self._site(cluster), self._clock()
        with site.lock:
            before = [
                d
                for d in site.deeds.read()
                if d["deed"] == "reset" and d["node"] == node and d["replaced"] == replaced
            ]
            if before and now_s - before[-1]["at_s"] < SAME_REBOOT_S:
                return float(before[-1]["ready_s"])
            deed = {"deed": "reset", "node": node, "replaced": replaced}
            site.deeds.add({**deed, "at_s": now_s, "ready_s": now_s + REBOOT_S})
        return now_s + REBOOT_S

    def _refuse_hidden(self, site: Site, cluster: ClusterOrder, run: RunOrder) -> None:
        hidden = site.at(cluster, self._clock()).epoch.harm.hidden
        for node, chip in run.chips:
            if hidden[node * cluster.chips_per_node + chip]:
                raise RunError(f"node {node} cannot be reached")

    def _record_all(self, site: Site, cluster: ClusterOrder, now_s: float) -> None:
        for run in cluster.runs:
            self._record(site, cluster, run, now_s)

    def _record(self, site: Site, cluster: ClusterOrder, run: RunOrder, now_s: float) -> RunReport:
        deed = site.begun(run)
        if deed is None:
            return RunReport(RunState.ABSENT)
        if max(deed["chips"]) >= cluster.chips:
            return RunReport(RunState.LOST, "the nodes it was on are no more")
        view = site.at(cluster, now_s)
        course = view.course(run)
        if course is None:  # it begins later than now
            return RunReport(RunState.STARTING)
        if view.epoch.harm.hidden[course.chips].any():
            return RunReport(RunState.UNKNOWN, "a node that it is on cannot be reached")
        book = site.book(run.run_dir)
        book.refresh()
        if run.attempt not in book.ended:
            begin_bytes = deed["metrics_bytes"]
            events, lines = tell(course, book, begin_bytes, view.at_s, site.wall)
            if events or lines:
                book.write(events, lines, begin_bytes)
        return _report(course, book, run, view.at_s)


def _report(course: Course, book: Logbook, run: RunOrder, at_s: float) -> RunReport:
    """What was written down counts: others have read it."""
    if kind := book.ended.get(run.attempt):
        return RunReport(_ENDS[Kind(kind)], course.message)
    starting = course.phase is Phase.STARTING and at_s < course.ended_s
    return RunReport(RunState.STARTING if starting else RunState.RUNNING)


def _deed(cluster: ClusterOrder, run: RunOrder, job: Job, book: Logbook) -> dict[str, Any]:
    chips = [node * cluster.chips_per_node + chip for node, chip in run.chips]
    work = work_of(job, catalogued(cluster.spec), cluster.spec.instance)
    return {
        "deed": "run",
        "job": run.job_id,
        "attempt": run.attempt,
        "chips": chips,
        "ranks": run.ranks,
        "started_s": run.started_s,
        "work": work.document(),
        "resumed": book.saved,
        "metrics_bytes": max(0, book.metrics_bytes),
    }


def _prepare(run: RunOrder, job: Job) -> None:
    """The files of a run that say what it is, as the trainer leaves them."""
    try:
        run.run_dir.mkdir(parents=True, exist_ok=True)
        if not (run.run_dir / "job.toml").exists():
            (run.run_dir / "job.toml").write_text(run.job_file.read_text())
        if run.ranks > _MOST_PLANNED or (run.run_dir / "plan.json").exists():
            return
        plan = describe_plan(job)
        for rank in plan["ranks"]:
            node, chip = run.chips[rank["rank"]]
            rank |= {"node": f"node-{node}", "chip": f"chip:{chip}"}
        plan["assumptions"][-1] = "chips are simulated"
        plan["peak_source"] = "none: simulated"
        (run.run_dir / "plan.json").write_text(json.dumps(plan, indent=2))
    except OSError as error:
        raise RunError(f"{run.run_dir}: cannot be written ({error.strerror})") from error
