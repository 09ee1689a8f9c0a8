"""Engine `kubernetes`: labelled nodes, one JobSet for each attempt.

Nodes of a cluster are those with the label `meshwright.dev/cluster=NAME`, in the order of their
names. The folder of the cluster is on a volume that all pods mount at the same path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.base.errors import ConfigError, RunError
from meshwright.control.emit.common import chips_per_node, resource
from meshwright.control.engines.attempt_folder import LEAD, Folder, Order
from meshwright.control.engines.attempt_story import Story
from meshwright.control.engines.engine import (
    ClusterOrder,
    ClusterReport,
    DeployStep,
    Fault,
    NodeReport,
    RunOrder,
    RunReport,
)
from meshwright.control.engines.kubernetes_api import NODES, Access, KubeApi
from meshwright.control.engines.kubernetes_decide import (
    DRAINED,
    Seen,
    drained_by,
    judge,
    node_status,
)
from meshwright.control.engines.kubernetes_manifests import (
    ATTEMPT_LABEL,
    CLUSTER_LABEL,
    JOB_LABEL,
    JOBSET,
    Place,
    RunPods,
    jobset,
)
from meshwright.control.spec import ClusterSpec
from meshwright.control.words import Health, NodeAction, NodeStatus, RunState
from meshwright.plan.job import load_job

_HEALTH = {
    NodeStatus.RUNNING: Health.HEALTHY,
    NodeStatus.DRAINED: Health.DEGRADED,
    NodeStatus.FAILED: Health.FAILED,
}


class KubernetesEngine:
    """See `Engine`. `kube_api` is the address of the API server; in a pod it is found. `claim` is
    the volume that pods share, mounted at `mount`; `queue` is a LocalQueue of Kueue, if any."""

    name = "kubernetes"

    def __init__(
        self,
        kube_api: str = "",
        token: str = "",
        image: str = "meshwright",
        claim: str = "meshwright",
        mount: str = "",
        queue: str = "",
    ) -> None:
        access = Access(kube_api, token) if kube_api else Access.of_pod(os.environ)
        self._api = KubeApi(access)
        self._image, self._claim, self._mount, self._queue = image, claim, mount, queue
        self._stories: dict[Path, Story] = {}

    def refuse(self, spec: ClusterSpec) -> None:
        """Raise ConfigError where too few nodes have the label of the cluster."""
        found = len(self._nodes(spec))
        if found < spec.nodes:
            fix = f"{found} nodes have the label {_selector(spec)}; label more, or ask for fewer"
            raise ConfigError("nodes", spec.nodes, fix)

    def chips_per_node(self, spec: ClusterSpec) -> int:
        """As asked for, or the instance's."""
        return chips_per_node(spec)

    def deploy(self, cluster: ClusterOrder) -> Iterator[DeployStep]:
        """Find its nodes, their chips and the shared volume. Nothing is run there."""
        self.refuse(cluster.spec)
        nodes = self._nodes(cluster.spec)[: cluster.spec.nodes]
        yield DeployStep("initialise", f"{len(nodes)} nodes have its label", 0.3)
        kind = resource(cluster.spec)
        for node in nodes:
            chips = int(node.get("status", {}).get("allocatable", {}).get(kind, 0))
            if chips < cluster.chips_per_node:
                name = node["metadata"]["name"]
                raise RunError(f"node {name} has {chips} of {kind}, not {cluster.chips_per_node}")
        yield DeployStep("compute", f"each has {cluster.chips_per_node} of {kind}", 0.6)
        where = f"/api/v1/namespaces/{cluster.spec.namespace}/persistentvolumeclaims/{self._claim}"
        if self._api.get(where) is None:
            raise RunError(f"namespace {cluster.spec.namespace} has no volume claim {self._claim}")
        yield DeployStep("mount", f"volume claim {self._claim} is there", 0.9)
        cluster.home.mkdir(parents=True, exist_ok=True)
        yield DeployStep("ready", f"{cluster.spec.name} is ready", 1.0)

    def destroy(self, cluster: ClusterOrder) -> None:
        """Delete its JobSets."""
        for one in self._api.list(_jobsets(cluster.spec), _selector(cluster.spec)):
            self._api.delete(f"{_jobsets(cluster.spec)}/{one['metadata']['name']}")

    def observe(self, cluster: ClusterOrder, now_s: float) -> ClusterReport:
        """What the API server says; all UNKNOWN where it does not answer."""
        try:
            nodes = self._nodes(cluster.spec)[: cluster.spec.nodes]
        except RunError as error:
            blind = [_unknown(n, cluster, str(error)) for n in range(cluster.spec.nodes)]
            return ClusterReport(now_s, tuple(blind), None)
        found = [_report(number, node, cluster) for number, node in enumerate(nodes)]
        lacking = range(len(found), cluster.spec.nodes)
        found += [_unknown(n, cluster, "no node has its label") for n in lacking]
        return ClusterReport(now_s, tuple(found), None)

    def act(self, cluster: ClusterOrder, node: int, action: NodeAction) -> Iterator[DeployStep]:
        """Cordon a node, or take it back if it was we who did."""
        nodes = self._nodes(cluster.spec)
        if node >= len(nodes):
            raise ConfigError("node", node, f"the cluster has nodes 0 to {len(nodes) - 1}")
        found = nodes[node]
        name, ours = found["metadata"]["name"], drained_by(found).startswith("meshwright")
        cordoned = bool(found.get("spec", {}).get("unschedulable"))
        if action not in (NodeAction.DRAIN, NodeAction.RESUME):
            fix = "Kubernetes cannot; drain the node, do it there, and resume it"
            raise ConfigError("action", str(action), fix)
        if action is NodeAction.RESUME and cordoned and not ours:
            fix = f"{name} was cordoned by somebody else, who resumes it: kubectl uncordon {name}"
            raise ConfigError("action", "resume", fix)
        drain = action is NodeAction.DRAIN
        if drain != cordoned:
            mark = {DRAINED: "asked for" if drain else None}
            change = {"spec": {"unschedulable": drain}, "metadata": {"annotations": mark}}
            self._api.merge(f"{NODES}/{name}", change)
        yield DeployStep(str(action), f"{name} takes {'no ' if drain else ''}new work", 1.0)

    def inject(self, cluster: ClusterOrder, fault: Fault) -> None:
        """None can be."""
        fix = f"{cluster.spec.name} has real machines; use one of engine local or simulated"
        raise ConfigError("kind", str(fault.kind), fix)

    def clear(self, cluster: ClusterOrder, fault: Fault) -> None:
        """Nothing was done."""

    def start(self, cluster: ClusterOrder, run: RunOrder) -> Mapping[str, Any]:
        """A JobSet: `jobset` is its name. Those of earlier attempts are deleted."""
        nodes = self._nodes(cluster.spec)
        folder = Folder.of(cluster.home, run.job_id)
        order = _order(run, nodes)
        known = folder.order()
        if known is None or known.attempt < run.attempt:
            folder.give(order)
        selector = f"{_selector(cluster.spec)},{JOB_LABEL}={run.job_id}"
        for one in self._api.list(_jobsets(cluster.spec), selector):
            if int(one["metadata"]["labels"][ATTEMPT_LABEL]) < run.attempt:
                self._api.delete(f"{_jobsets(cluster.spec)}/{one['metadata']['name']}")
        name = _name(run)
        document = jobset(self._pods(cluster, run, order, folder))
        self._api.apply(f"{_jobsets(cluster.spec)}/{name}", document)
        return {"jobset": name}

    def look(self, cluster: ClusterOrder, run: RunOrder) -> RunReport:
        """By the marks and locks of the run, and by its JobSet."""
        folder = Folder.of(cluster.home, run.job_id)
        order = folder.order()
        if order is None or order.attempt < run.attempt:
            return RunReport(RunState.ABSENT)
        if order.attempt > run.attempt:
            return RunReport(RunState.LOST, f"attempt {order.attempt} has taken its place")
        held = folder.held(LEAD)  # before the marks, which are made under the lock
        marks = {
            what: folder.marked(LEAD, run.attempt, what) for what in ("begun", "ended", "stop")
        }
        story = self._stories.setdefault(run.run_dir, Story(run.run_dir))
        story.follow()
        ready, end, error = story.since(run.started_s)
        answered, found = True, None
        try:
            found = self._api.get(f"{_jobsets(cluster.spec)}/{_name(run)}")
        except RunError:
            answered = False
        return judge(
            Seen(
                answered=answered,
                jobset=found,
                survives=order.survives,
                held=held and marks["begun"],
                ready=ready,
                end=end,
                error=error,
                **marks,
            )
        )

    def stop(self, cluster: ClusterOrder, run: RunOrder, hard: bool) -> None:
        """Leave word for its leader; what has not begun, or is to end now, is deleted."""
        folder = Folder.of(cluster.home, run.job_id)
        if folder.order() is None:
            return
        folder.mark(LEAD, run.attempt, "stop")
        if hard:
            folder.mark(LEAD, run.attempt, "kill")
        if hard or not folder.marked(LEAD, run.attempt, "begun"):
            self._api.delete(f"{_jobsets(cluster.spec)}/{_name(run)}")

    def close(self) -> None:
        """Close the connections; pods go on."""
        self._api.close()

    def _nodes(self, spec: ClusterSpec) -> list[dict[str, Any]]:
        found = self._api.list(NODES, _selector(spec))
        return sorted(found, key=lambda node: str(node["metadata"]["name"]))

    def _pods(self, cluster: ClusterOrder, run: RunOrder, order: Order, folder: Folder) -> RunPods:
        training = {node for node, _ in run.chips[: run.ranks]}
        numbers = sorted({node for node, _ in run.chips})
        places = [
            Place(name, chips, trains=number in training)
            for number, name, chips in zip(numbers, order.nodes, order.chips, strict=True)
        ]
        return RunPods(
            name=_name(run),
            namespace=cluster.spec.namespace,
            cluster=cluster.spec.name.lower(),
            job_id=run.job_id,
            attempt=run.attempt,
            folder=str(folder.path),
            survives=order.survives,
            places=places,
            resource=resource(cluster.spec),
            image=f"{self._image}:{cluster.spec.software}",
            claim=self._claim,
            mount=self._mount or str(cluster.home),
            queue=self._queue,
        )


def _order(run: RunOrder, nodes: Sequence[Mapping[str, Any]]) -> Order:
    numbers = sorted({node for node, _ in run.chips})
    if numbers[-1] >= len(nodes):
        raise RunError(f"node {numbers[-1]} of the cluster has lost its label")
    job = load_job(run.job_file)
    if not job.resilience.survives and len(numbers) > 1:
        fix = f"a job on {len(numbers)} nodes needs one; set it to auto, or ask for one node"
        raise ConfigError("resilience.redundancy", job.resilience.redundancy, fix)
    return Order(
        attempt=run.attempt,
        started_s=run.started_s,
        run_dir=str(run.run_dir),
        job_file=str(run.job_file),
        nodes=[str(nodes[number]["metadata"]["name"]) for number in numbers],
        chips=[sum(number == node for node, _ in run.chips) for number in numbers],
        ranks=run.ranks,
        survives=job.resilience.survives,
        waits=job.resilience.on_no_spare == "wait",
        python="python",
    )


def _selector(spec: ClusterSpec) -> str:
    return f"{CLUSTER_LABEL}={spec.name.lower()}"


def _jobsets(spec: ClusterSpec) -> str:
    return f"/apis/{JOBSET}/namespaces/{spec.namespace}/jobsets"


def _name(run: RunOrder) -> str:
    return f"mw-{run.job_id.lower()}-{run.attempt}"


def _report(number: int, node: Mapping[str, Any], cluster: ClusterOrder) -> NodeReport:
    status, message = node_status(node)
    health = _HEALTH.get(status, Health.UNKNOWN)
    addresses = node.get("status", {}).get("addresses", ())
    address = next((one["address"] for one in addresses if one["type"] == "InternalIP"), "")
    chips = (health,) * cluster.chips_per_node
    return NodeReport(number, status, health, chips, address=address, message=message)


def _unknown(number: int, cluster: ClusterOrder, why: str) -> NodeReport:
    chips = (Health.UNKNOWN,) * cluster.chips_per_node
    return NodeReport(number, NodeStatus.UNKNOWN, Health.UNKNOWN, chips, message=why)
