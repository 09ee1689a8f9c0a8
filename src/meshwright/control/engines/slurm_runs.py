"""Attempts at jobs on a Slurm cluster: the effects around `slurm_decide`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.base.errors import ConfigError, RunError
from meshwright.conduct.hosts import HOSTS_VARIABLE
from meshwright.control.engines.attempt_folder import BATCH_FILE, LEAD, Folder, Order
from meshwright.control.engines.attempt_story import Story
from meshwright.control.engines.engine import ClusterOrder, RunOrder, RunReport
from meshwright.control.engines.slurm_batch import (
    MODULE,
    batch_script,
    job_name,
    node_numbers,
    prefix,
    sbatch_options,
)
from meshwright.control.engines.slurm_client import Commands, Picture, ask_daemons
from meshwright.control.engines.slurm_decide import (
    Act,
    Answer,
    Begin,
    Evidence,
    Judged,
    NodeEvidence,
    begin,
    judge,
)
from meshwright.control.engines.slurm_words import OURS, Node, SlurmJob
from meshwright.control.words import NodeStatus, RunState
from meshwright.plan.job import load_job

_PATIENT_S = 10.0  # of a command on a thread of its own: what clears away is slow to answer
_SETTLED_S = 1.2  # nodes refuse a job whose credential is of the second in which it was revoked
_RELEASE_S = 20.0
_GRACE_S = 3.0  # for a job that has ended to leave by itself
_CONDUCT_S = 5.0  # for a conductor to take its lock


class SlurmRuns:
    """Starts, sees and stops attempts. What takes long is done on threads, one thing at a time for
    a job; a service that is killed meanwhile does it again, since it is asked for again."""

    def __init__(self, commands: Commands, python: str = sys.executable) -> None:
        self._commands, self._python = commands, python
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="slurm")
        self._busy: set[str] = set()
        self._stories: dict[Path, Story] = {}
        self._conducted: dict[Path, float] = {}

    def close(self) -> None:
        """Wait for what is under way."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    # --- what the service asks for

    def start(self, cluster: ClusterOrder, run: RunOrder, nodes: Sequence[Node]) -> dict[str, Any]:
        """A job of Slurm for this attempt: the one there is, that of an earlier attempt, or a new
        one; never two. Raises RunError where Slurm does not answer."""
        folder = Folder.of(cluster.home, run.job_id)
        order, known = self._order(run, nodes), folder.order()
        if known is None or known.attempt < run.attempt:
            folder.give(order)
        return {"slurm_job": self._begin(cluster, run, folder, nodes)}

    def look(self, cluster: ClusterOrder, run: RunOrder, picture: Picture | None) -> RunReport:
        """The state of an attempt; what follows from it is done, or begun."""
        folder = Folder.of(cluster.home, run.job_id)
        order = folder.order()
        if order is None or order.attempt < run.attempt:
            return RunReport(RunState.ABSENT)
        if order.attempt > run.attempt:
            return RunReport(RunState.LOST, f"attempt {order.attempt} has taken its place")
        seen = self._see(cluster, run, order, folder, picture)
        judged = judge(seen)
        self._take_out(run, judged, picture)
        with suppress(RunError):  # it is asked for again in a second
            self._do(cluster, run, folder, order, seen, judged, picture)
        return RunReport(judged.state, judged.message)

    def stop(self, cluster: ClusterOrder, run: RunOrder, hard: bool) -> None:
        """Leave word for whoever leads it; what waits is cancelled by the next look."""
        folder = Folder.of(cluster.home, run.job_id)
        if folder.order() is None:
            return
        folder.mark(LEAD, run.attempt, "stop")
        if hard:
            folder.mark(LEAD, run.attempt, "kill")
            self._aside(f"kill {folder.path}", self._cancel, job_name(cluster, run))

    def destroy(self, cluster: ClusterOrder, bound_s: float = 30.0) -> None:
        """End all of them. Raises RunError if some do not end."""
        home = cluster.home / "runs"
        folders = [Folder(path) for path in home.iterdir()] if home.is_dir() else []
        for folder in folders:
            if (order := folder.order()) is not None:
                folder.mark(LEAD, order.attempt, "stop")
                folder.mark(LEAD, order.attempt, "kill")
        deadline_s, why = time.monotonic() + bound_s, ""
        while time.monotonic() < deadline_s:
            try:
                if not self._cancel_all(cluster) and not any(f.held(LEAD) for f in folders):
                    return
                why = "they do not end"
            except RunError as error:  # it may answer yet
                why = str(error)
            time.sleep(0.2)
        raise RunError(f"jobs of cluster {cluster.id}: {why}")

    def _cancel_all(self, cluster: ClusterOrder) -> list[int]:
        """Cancel its jobs; those that had not ended. Raises RunError where Slurm is too slow."""
        jobs = [job for job in self._commands.jobs() if job.name.startswith(prefix(cluster))]
        left = [job.id for job in jobs if job.active]
        if left:
            self._commands.call("scancel", *map(str, left), timeout_s=_PATIENT_S)
        return left

    # --- what is seen

    def _see(
        self,
        cluster: ClusterOrder,
        run: RunOrder,
        order: Order,
        folder: Folder,
        picture: Picture | None,
    ) -> Evidence:
        held = folder.held(LEAD)  # before the marks: they are made under the lock
        begun = folder.marked(LEAD, run.attempt, "begun")
        ended = folder.marked(LEAD, run.attempt, "ended")
        submitted = folder.submitted()
        story = self._stories.setdefault(run.run_dir, Story(run.run_dir))
        story.follow()
        ready, end, error = story.since(run.started_s)
        jobs = picture.named(job_name(cluster, run)) if picture else []
        heard = picture is not None and picture.asked_s > submitted["at"]
        mine = begin([job for job in jobs if job.attempt == run.attempt], run.attempt)
        return Evidence(
            survives=order.survives,
            waits=order.waits,
            ranks=order.ranks,
            heard=heard,
            submits=submitted["times"],
            slurm=mine.job,
            begun=begun,
            held=held and begun,
            ended=ended,
            stop=folder.marked(LEAD, run.attempt, "stop"),
            ready=ready,
            end=end,
            error=error or (_last_words(folder, order) if ended else ""),
            nodes=_nodes(folder, order, held, picture),
        )

    # --- what is done

    def _do(
        self,
        cluster: ClusterOrder,
        run: RunOrder,
        folder: Folder,
        order: Order,
        seen: Evidence,
        judged: Judged,
        picture: Picture | None,
    ) -> None:
        match judged.act:
            case Act.SUBMIT if picture is not None:
                nodes = [node for node in picture.nodes if node.name in order.nodes]
                self._begin(cluster, run, folder, nodes)
            case Act.CONDUCT:
                self._conduct(folder)
            case Act.RELEASE if seen.slurm is not None:
                self._aside(f"again {folder.path}", self._release, seen.slurm.id)
            case Act.SET_ASIDE:
                folder.mark(LEAD, run.attempt, "kill")
                if seen.slurm is not None and not _is_held_back(seen.slurm):
                    self._aside(f"aside {folder.path}", self._set_aside, seen.slurm.id)
            case Act.CLEAR if seen.slurm is not None and seen.slurm.active:
                if (seen.stop and not seen.begun) or self._overdue(folder, run):
                    self._aside(f"clear {folder.path}", self._cancel, seen.slurm.name)

    def _begin(
        self, cluster: ClusterOrder, run: RunOrder, folder: Folder, nodes: Sequence[Node]
    ) -> int | None:
        """The number of the job of Slurm that is, or becomes, that of this attempt."""
        order, key = folder.order(), f"again {folder.path}"
        assert order is not None
        jobs = [job for job in self._commands.jobs() if job.name == job_name(cluster, run)]
        how = begin(jobs, run.attempt)
        for surplus in how.surplus:
            self._commands.call("scancel", str(surplus))
        if how.job is None:
            submitted: int | None = folder.submitted()["job"]
            known = key in self._busy or self._begun(folder, run)
            return submitted if known else self._submit(cluster, run, folder, nodes)
        if how.how is Begin.AGAIN:
            self._aside(key, self._again, folder, order, how.job)
        return how.job.id

    def _take_out(self, run: RunOrder, judged: Judged, picture: Picture | None) -> None:
        """Nodes that are known to be lost, out of service: drained, so that no daemon that comes
        back makes them take work, and down, so that their jobs go on without them."""
        known = {node.name: node for node in picture.nodes} if picture else {}
        for name in judged.dead:
            node = known.get(name)
            reason = f"{OURS}{name} was lost under job {run.job_id}, attempt {run.attempt}"
            if node is not None and node.status is NodeStatus.DRAINED:
                if node.ours or node.unseen:
                    continue
                reason = node.reason  # of somebody else, whose it stays
            self._aside(f"drain {name}", self._drain, name, reason)

    def _drain(self, name: str, reason: str) -> None:
        for state in ("drain", "down"):
            words = (f"nodename={name}", f"state={state}", f"reason={reason}")
            self._commands.call("scontrol", "update", *words, timeout_s=_PATIENT_S)

    def _submit(
        self, cluster: ClusterOrder, run: RunOrder, folder: Folder, nodes: Sequence[Node]
    ) -> int:
        order = folder.order()
        assert order is not None
        script = folder.path / BATCH_FILE
        script.write_text(batch_script(order, folder))
        options = sbatch_options(cluster, run, order, folder, nodes)
        folder.note_submitted(run.attempt, time.time(), None)
        job = self._commands.submit(options, script)
        submitted = {**folder.submitted(), "at": time.time(), "job": job}
        folder.write("submitted.json", submitted)
        return job

    def _conduct(self, folder: Folder) -> None:
        """Start a conductor, on this machine and not under Slurm, whose end is not ours."""
        now_s = time.monotonic()
        if now_s - self._conducted.get(folder.path, -_CONDUCT_S) < _CONDUCT_S:
            return
        self._conducted[folder.path] = now_s
        with (folder.path / "lead.log").open("ab") as log:
            subprocess.run(
                ["setsid", "--fork", self._python, "-m", MODULE, LEAD, str(folder.path), "--once"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=1.0,
                check=True,
            )

    def _again(self, folder: Folder, order: Order, job: SlurmJob) -> None:
        """Have the job of an earlier attempt run on the nodes of this one, and keep its age."""
        folder.note_submitted(order.attempt, time.time(), job.id)
        self._set_aside(job.id)
        words = [f"jobid={job.id}", f"comment=attempt={order.attempt}"]
        words += [f"ReqNodeList={','.join(order.nodes)}", f"NumNodes={len(order.nodes)}"]
        self._commands.call("scontrol", "update", *words, timeout_s=_PATIENT_S)
        self._release(job.id)

    def _set_aside(self, job: int) -> None:
        """Requeue it, held, and wait until nothing of it is left on its nodes."""
        deadline_s = time.monotonic() + _RELEASE_S
        asked_s = None
        while (found := self._job(job)) is not None and time.monotonic() < deadline_s:
            if found.waiting:
                break
            if found.state != "COMPLETING" and asked_s is None:
                asked_s = time.monotonic()
                self._commands.call("scontrol", "requeuehold", str(job), timeout_s=_PATIENT_S)
            time.sleep(0.1)

    def _release(self, job: int) -> None:
        """Clear the hold, and the two minutes that Slurm adds to it, until it runs."""
        time.sleep(_SETTLED_S)
        self._commands.call("scontrol", "release", str(job), timeout_s=_PATIENT_S)
        deadline_s = time.monotonic() + _RELEASE_S
        while time.monotonic() < deadline_s:
            with suppress(RunError):  # it runs already
                words = ("scontrol", "update", f"jobid={job}", "StartTime=now")
                self._commands.call(*words, timeout_s=_PATIENT_S)
            found = self._job(job)
            if found is None or not found.waiting or found.reason not in ("BeginTime", "None"):
                return
            time.sleep(0.2)

    def _cancel(self, name: str) -> None:
        for job in self._commands.jobs():
            if job.name == name and job.active:
                self._commands.call("scancel", str(job.id), timeout_s=_PATIENT_S)

    def _job(self, number: int) -> SlurmJob | None:
        return next((job for job in self._commands.jobs() if job.id == number), None)

    def _aside(self, key: str, work: Callable[..., None], *arguments: Any) -> None:
        """Do it on a thread, unless that is being done."""
        if key in self._busy:
            return
        self._busy.add(key)

        def run() -> None:
            try:
                with suppress(RunError):  # what is left undone is seen, and done again
                    work(*arguments)
            finally:
                self._busy.discard(key)

        self._threads.submit(run)

    def _begun(self, folder: Folder, run: RunOrder) -> bool:
        """Whether this attempt was given to Slurm, and there is more to it than that."""
        begun = folder.marked(LEAD, run.attempt, "begun")
        return begun and folder.submitted()["attempt"] == run.attempt

    def _overdue(self, folder: Folder, run: RunOrder) -> bool:
        mark = folder.path / f"{LEAD}-{run.attempt}.ended"
        return mark.exists() and time.time() - mark.stat().st_mtime > _GRACE_S

    def _order(self, run: RunOrder, nodes: Sequence[Node]) -> Order:
        job = load_job(run.job_file)
        chips = [sum(number == node for node, _ in run.chips) for number in node_numbers(run)]
        survives = job.resilience.survives
        if not survives and len(nodes) > 1:
            raise ConfigError(
                "resilience.redundancy",
                job.resilience.redundancy,
                f"a job on {len(nodes)} nodes needs one; set it to auto, or ask for the chips of "
                "one node",
            )
        if survives and len(nodes) > run.ranks:
            fix = f"a run has at least one rank on each node, and this one has {run.ranks}"
            raise ConfigError("cluster.nodes", len(nodes), f"{fix}; put its spares on fewer nodes")
        away = survives and bool(os.environ.get(HOSTS_VARIABLE))
        return Order(
            attempt=run.attempt,
            started_s=run.started_s,
            run_dir=str(run.run_dir),
            job_file=str(run.job_file),
            nodes=[node.name for node in nodes],
            chips=chips,
            ranks=run.ranks,
            survives=survives,
            waits=job.resilience.on_no_spare == "wait",
            python=self._python,
            addresses={node.name: node.address for node in nodes} if away else {},
        )


def _nodes(
    folder: Folder, order: Order, led: bool, picture: Picture | None
) -> tuple[NodeEvidence, ...]:
    """Daemons are asked only where something is amiss."""
    known = {node.name: node for node in picture.nodes} if picture else {}
    begun, held = {}, {}
    for name in order.nodes:
        part = f"node-{name}"
        held[name] = folder.held(part) if order.survives else led
        begun[name] = folder.marked(part if order.survives else LEAD, order.attempt, "begun")
    amiss = [
        known[name]
        for name in order.nodes
        if name in known and begun[name] and (not held[name] or known[name].unseen)
    ]
    answers = ask_daemons(amiss)
    return tuple(
        NodeEvidence(name, begun[name], held[name], answers.get(name, Answer.UNASKED), chips)
        for name, chips in zip(order.nodes, order.chips, strict=True)
    )


def _last_words(folder: Folder, order: Order) -> str:
    """The last line that its leader wrote."""
    log = folder.path / ("lead.log" if order.survives else "slurm.log")
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        return ""
    return lines[-1].removeprefix("error: ") if lines else ""


def _is_held_back(job: SlurmJob) -> bool:
    return job.waiting and "held" in job.reason.lower()
