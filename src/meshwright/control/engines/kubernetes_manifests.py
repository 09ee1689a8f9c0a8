"""A run as a JobSet: one replicated job for each group of like nodes, all of them or none. Pure.

API versions: jobset.x-k8s.io/v1alpha2, batch/v1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

JOBSET = "jobset.x-k8s.io/v1alpha2"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
HOSTNAME = "kubernetes.io/hostname"
JOB_LABEL, ATTEMPT_LABEL = "meshwright.dev/job", "meshwright.dev/attempt"
CLUSTER_LABEL = "meshwright.dev/cluster"
LEAD_GROUP, SPARES_GROUP, NODES_GROUP = "lead", "spares", "nodes"
_MODULE = "meshwright.control.engines.attempt_process"
_PATIENCE = 10_000  # pods are made anew: who gives up is the run


@dataclass(frozen=True)
class Place:
    """One node of a run, in the order of its agents."""

    node: str  # its name in the cluster
    chips: int
    trains: bool  # false: it has spare chips alone


@dataclass(frozen=True)
class RunPods:
    """What the pods of an attempt are made of."""

    name: str
    namespace: str
    cluster: str
    job_id: str
    attempt: int
    folder: str
    survives: bool
    places: Sequence[Place]
    resource: str  # of a chip, as device plugins call it
    image: str
    claim: str  # of the volume that all pods see, at the path where we see it
    mount: str
    queue: str = ""  # of Kueue; empty: the JobSet begins at once


def jobset(run: RunPods) -> dict[str, Any]:
    """The JobSet. A run with redundancy has a pod that conducts and one for each node; one without
    is a single pod."""
    labels = {CLUSTER_LABEL: run.cluster, JOB_LABEL: run.job_id, ATTEMPT_LABEL: str(run.attempt)}
    queue = {QUEUE_LABEL: run.queue} if run.queue else {}
    groups = [_lead(run)] if not run.survives else [_lead(run), *_groups(run)]
    return {
        "apiVersion": JOBSET,
        "kind": "JobSet",
        "metadata": {
            "name": run.name,
            "namespace": run.namespace,
            "labels": {**labels, **queue},
        },
        "spec": {
            **({"suspend": True} if run.queue else {}),
            "network": {"enableDNSHostnames": True},
            # The run is over when its leader is; a lost pod does not start it all anew.
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [LEAD_GROUP]},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": groups,
        },
    }


def _lead(run: RunPods) -> dict[str, Any]:
    places = [] if run.survives else run.places
    group = _replicated(LEAD_GROUP, 1, [_container(run, "lead", places)], run, places)
    if run.survives:  # its end is the end: agents have left by then
        group["template"]["spec"]["backoffLimit"] = _PATIENCE
    return group


def _groups(run: RunPods) -> list[dict[str, Any]]:
    """Neighbours with as many chips each; agents are numbered through."""
    found, first = [], 0
    for (trains, _), group in groupby(run.places, key=lambda place: (place.trains, place.chips)):
        places = list(group)
        name = f"{NODES_GROUP if trains else SPARES_GROUP}-{first}"
        words = ["agent", f"--first={first}"]
        found.append(_replicated(name, len(places), [_container(run, words, places)], run, places))
        first += len(places)
    return found


def _replicated(
    name: str,
    pods: int,
    containers: Sequence[Mapping[str, Any]],
    run: RunPods,
    places: Sequence[Place],
) -> dict[str, Any]:
    volume = {"name": "shared", "persistentVolumeClaim": {"claimName": run.claim}}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": containers,
        "volumes": [volume],
    }
    meta: dict[str, Any] = {"labels": {CLUSTER_LABEL: run.cluster, JOB_LABEL: run.job_id}}
    if places:
        pod["affinity"] = _affinity(run, places)
    alone = pods == 1 and bool(places)  # else the pods keep each other off their nodes
    annotations = {"metadata": {"annotations": {EXCLUSIVE: HOSTNAME}}} if alone else {}
    return {
        "name": name,
        "replicas": 1,
        "template": {
            **annotations,
            "spec": {
                "parallelism": pods,
                "completions": pods,
                "completionMode": "Indexed",
                "backoffLimit": _PATIENCE if run.survives else 0,
                "template": {"metadata": meta, "spec": pod},
            },
        },
    }


def _affinity(run: RunPods, places: Sequence[Place]) -> dict[str, Any]:
    """On these nodes, one pod of the job on each."""
    names = [place.node for place in places]
    where = {"key": HOSTNAME, "operator": "In", "values": names}
    apart = {"labelSelector": {"matchLabels": {JOB_LABEL: run.job_id}}, "topologyKey": HOSTNAME}
    # Its leader, which has no chips, may be beside one of them.
    alone = {"key": "jobset.sigs.k8s.io/replicatedjob-name", "operator": "NotIn"}
    apart["labelSelector"] = {
        "matchLabels": {JOB_LABEL: run.job_id},
        "matchExpressions": [{**alone, "values": [LEAD_GROUP]}],
    }
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    return {
        "nodeAffinity": {required: {"nodeSelectorTerms": [{"matchExpressions": [where]}]}},
        "podAntiAffinity": {required: [apart]},
    }


def _container(run: RunPods, role: str | Sequence[str], places: Sequence[Place]) -> dict[str, Any]:
    words = [role] if isinstance(role, str) else list(role)
    command = ["python", "-m", _MODULE, words[0], run.folder, *words[1:]]
    chips = max((place.chips for place in places), default=0)
    limits = {"resources": {"limits": {run.resource: str(chips)}}} if chips else {}
    by_field = {"fieldRef": {"fieldPath": "status.podIP"}}
    return {
        "name": "meshwright",
        "image": run.image,
        "command": command,
        "env": [{"name": "MESHWRIGHT_HOSTS", "valueFrom": by_field}],
        **limits,
        "volumeMounts": [{"name": "shared", "mountPath": run.mount}],
    }
