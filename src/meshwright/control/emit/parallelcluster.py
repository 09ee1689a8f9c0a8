"""A cluster of AWS ParallelCluster 3 with Slurm, on which engine `slurm` runs.

Keys are those of its cluster configuration file, version 3.
"""

from __future__ import annotations

from typing import Any

from meshwright.control.emit.common import (
    REGION,
    as_yaml,
    cloud_type,
    fill_in,
    kms_key,
    labels,
    lustre_gib,
    lustre_rate,
    subnet,
    tag,
)
from meshwright.control.spec import ClusterSpec

_HEAD = "m5.2xlarge"
_MOUNT = "/fsx"
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"SlurmdTimeout": 60},  # seconds until a silent node is given up; runs know sooner
    {"ReturnToService": 2},
    {"JobRequeue": 1},
)


def parallelcluster(spec: ClusterSpec) -> dict[str, str]:
    """The configuration file. All nodes are there all the while, close together, joined by EFA.
    Raises ConfigError for an instance that AWS does not have."""
    queue = spec.partition or "train"
    document = {
        "Region": REGION,
        "Image": {"Os": "ubuntu2204"},
        "HeadNode": {"InstanceType": _HEAD, "Networking": {"SubnetId": subnet(spec)}},
        "Scheduling": {
            "Scheduler": "slurm",
            "SlurmSettings": {"CustomSlurmSettings": list(_SETTINGS)},
            "SlurmQueues": [_queue(spec, queue)],
        },
        "SharedStorage": _storage(spec),
        "Tags": [{"Key": tag(key), "Value": tag(value)} for key, value in labels(spec).items()],
    }
    places = {
        "Region": "where the capacity is",
        "HeadNode.Networking.SubnetId, SlurmQueues[].Networking.SubnetIds": "subnets of the VPC",
    }
    return {"cluster.yaml": as_yaml(document), "fill-in.txt": fill_in(places)}


def _queue(spec: ClusterSpec, name: str) -> dict[str, Any]:
    return {
        "Name": name,
        "CapacityType": "ONDEMAND",
        "ComputeResources": [
            {
                "Name": "workers",
                "InstanceType": cloud_type(spec),
                "MinCount": spec.nodes,
                "MaxCount": spec.nodes,
                "DisableSimultaneousMultithreading": True,
                "Efa": {"Enabled": True},
            }
        ],
        "Networking": {"SubnetIds": [subnet(spec)], "PlacementGroup": {"Enabled": True}},
        "ComputeSettings": {"LocalStorage": {"RootVolume": {"Encrypted": spec.encryption.enabled}}},
    }


def _storage(spec: ClusterSpec) -> list[dict[str, Any]]:
    if not spec.storage.nodes:
        return []
    settings: dict[str, Any] = {
        "DeploymentType": "PERSISTENT_2",
        "StorageCapacity": lustre_gib(spec),
        "PerUnitStorageThroughput": lustre_rate(spec),
    }
    if key := kms_key(spec):
        settings["KmsKeyId"] = key
    return [
        {
            "Name": "shared",
            "StorageType": "FsxLustre",
            "MountDir": _MOUNT,
            "FsxLustreSettings": settings,
        }
    ]
