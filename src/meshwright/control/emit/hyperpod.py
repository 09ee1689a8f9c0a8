"""A cluster of SageMaker HyperPod: the request of `aws sagemaker create-cluster`.

Field names and limits are those of the service model that botocore carries.
"""

from __future__ import annotations

from typing import Any

from meshwright.control.emit.common import (
    ACCOUNT,
    GROUP,
    REGION,
    as_json,
    cloud_type,
    fill_in,
    kms_key,
    labels,
    subnet,
    tag,
)
from meshwright.control.spec import ClusterSpec

_ROLE = f"arn:aws:iam::{ACCOUNT}:role/SageMakerClusterExecutionRole"
_EKS = f"arn:aws:eks:{REGION}:{ACCOUNT}:cluster/{{name}}"
_SCRIPTS = f"s3://sagemaker-{ACCOUNT}/lifecycle/"
_CONTROLLER = "ml.m5.2xlarge"
_VOLUME_GIB = 500
_SAME_MACHINES = {"trn2u.48xlarge": "trn2.48xlarge"}  # HyperPod knows them by this name

_ON_CREATE = """\
#!/bin/bash
# Run once on each new node, before it takes work.
set -euo pipefail
python3 -m venv /opt/meshwright
/opt/meshwright/bin/pip install meshwright=={version}
ln -sf /opt/meshwright/bin/meshwright /usr/local/bin/meshwright
# By this address the other nodes reach this one.
echo "MESHWRIGHT_HOSTS=$(hostname -I | cut -d' ' -f1)" >>/etc/environment
"""


def hyperpod(spec: ClusterSpec) -> dict[str, str]:
    """The request, and the script of its nodes. Engine kubernetes: on EKS; else Slurm, with a
    controller of its own. Raises ConfigError for an instance that HyperPod does not have."""
    slurm = spec.engine != "kubernetes"
    request: dict[str, Any] = {
        "ClusterName": spec.name,
        "InstanceGroups": [*([_controller(spec)] if slurm else []), _workers(spec, slurm)],
        "VpcConfig": {"SecurityGroupIds": [GROUP], "Subnets": [subnet(spec)]},
        "Orchestrator": {"Slurm": {"SlurmConfigStrategy": "Managed"}}
        if slurm
        else {"Eks": {"ClusterArn": _EKS.format(name=spec.name)}},
        "NodeRecovery": "Automatic",
        "Tags": [{"Key": tag(key), "Value": tag(value)} for key, value in labels(spec).items()],
    }
    places = {
        "InstanceGroups[].ExecutionRole": f"the role of the nodes, for {_ROLE}",
        "InstanceGroups[].LifeCycleConfig.SourceS3Uri": "where the folder lifecycle/ was copied to",
        "VpcConfig": "the subnet of the capacity, and a security group that lets EFA through",
    }
    if not slurm:
        places["Orchestrator.Eks.ClusterArn"] = "the EKS cluster that the nodes join"
    return {
        "create-cluster.json": as_json(request),
        "lifecycle/on_create.sh": _ON_CREATE.format(version=spec.software),
        "fill-in.txt": fill_in(places),
    }


def _workers(spec: ClusterSpec, slurm: bool) -> dict[str, Any]:
    kind = cloud_type(spec)
    group = {
        "InstanceGroupName": "workers",
        "InstanceType": f"ml.{_SAME_MACHINES.get(kind, kind)}",
        "InstanceCount": spec.nodes,
        **_common(spec),
        "ThreadsPerCore": 1,
        "OnStartDeepHealthChecks": ["InstanceStress", "InstanceConnectivity"],
    }
    if slurm:
        names = [spec.partition or "train"]
        group["SlurmConfig"] = {"NodeType": "Compute", "PartitionNames": names}
    return group


def _controller(spec: ClusterSpec) -> dict[str, Any]:
    return {
        "InstanceGroupName": "controller",
        "InstanceType": _CONTROLLER,
        "InstanceCount": 1,
        **_common(spec),
        "SlurmConfig": {"NodeType": "Controller"},
    }


def _common(spec: ClusterSpec) -> dict[str, Any]:
    volume: dict[str, Any] = {"VolumeSizeInGB": _VOLUME_GIB}
    if key := kms_key(spec):
        volume["VolumeKmsKeyId"] = key
    return {
        "LifeCycleConfig": {"SourceS3Uri": _SCRIPTS, "OnCreate": "on_create.sh"},
        "ExecutionRole": _ROLE,
        "InstanceStorageConfigs": [{"EbsVolumeConfig": volume}],
    }
