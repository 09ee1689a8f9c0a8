"""A cluster on Kubernetes: what Kueue has to know of it, and a JobSet that takes all of it.

API versions: kueue.x-k8s.io/v1beta2, jobset.x-k8s.io/v1alpha2.
"""

from __future__ import annotations

from typing import Any

from meshwright.control.emit.common import as_yaml, chips_per_node, fill_in, resource
from meshwright.control.engines.kubernetes_manifests import CLUSTER_LABEL, HOSTNAME, Place, RunPods
from meshwright.control.engines.kubernetes_manifests import jobset as jobset_of
from meshwright.control.spec import ClusterSpec

_KUEUE = "kueue.x-k8s.io/v1beta2"
_LEVELS = ("topology.kubernetes.io/zone", "cloud.provider.com/topology-rack", HOSTNAME)


def jobset(spec: ClusterSpec) -> dict[str, str]:
    """Topology, flavour and queues of the cluster's chips, and an example of a run on them.
    Raises ConfigError for an instance that is not in the catalogue."""
    name = spec.name.lower()
    places = {
        "queues.yaml Topology.spec.levels": "labels of the nodes, the widest level first",
        "queues.yaml ResourceFlavor": f"label the nodes: {CLUSTER_LABEL}={name}",
        "jobset.yaml image, claimName": "an image with Meshwright, a volume that all pods share",
    }
    return {
        "queues.yaml": as_yaml(*_queues(spec, name)),
        "jobset.yaml": as_yaml(jobset_of(_example(spec, name))),
        "fill-in.txt": fill_in(places),
    }


def _queues(spec: ClusterSpec, name: str) -> list[dict[str, Any]]:
    chips = {"name": resource(spec), "nominalQuota": spec.nodes * chips_per_node(spec)}
    flavor = {"name": name, "resources": [chips]}
    here = {"matchLabels": {"kubernetes.io/metadata.name": spec.namespace}}
    return [
        _object("Topology", name, {"levels": [{"nodeLabel": label} for label in _LEVELS]}),
        _object(
            "ResourceFlavor", name, {"nodeLabels": {CLUSTER_LABEL: name}, "topologyName": name}
        ),
        _object(
            "ClusterQueue",
            name,
            {
                "namespaceSelector": here,
                "queueingStrategy": "BestEffortFIFO",
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [{"coveredResources": [resource(spec)], "flavors": [flavor]}],
            },
        ),
        _object("LocalQueue", name, {"clusterQueue": name}, spec.namespace),
    ]


def _object(kind: str, name: str, spec: dict[str, Any], namespace: str = "") -> dict[str, Any]:
    where = {"namespace": namespace} if namespace else {}
    return {
        "apiVersion": _KUEUE,
        "kind": kind,
        "metadata": {"name": name, **where},
        "spec": spec,
    }


def _example(spec: ClusterSpec, name: str) -> RunPods:
    """A run on all nodes: the last of them have the spares."""
    each = chips_per_node(spec)
    with_spares = min(-(-spec.spares // each), spec.nodes - 1)
    places = [
        Place(f"{name}-{number}", each, trains=number < spec.nodes - with_spares)
        for number in range(spec.nodes)
    ]
    return RunPods(
        name=f"{name}-run",
        namespace=spec.namespace,
        cluster=name,
        job_id="run",
        attempt=1,
        folder=f"/shared/{name}/runs/run",
        survives=spec.nodes > 1,
        places=places,
        resource=resource(spec),
        image=f"meshwright:{spec.software}",
        claim=f"{name}-shared",
        mount="/shared",
        queue=name,
    )
