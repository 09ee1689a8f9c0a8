"""Whatever cannot be done is refused as AWS refuses it, and nothing is done."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hyperpod_service import Service, group, in_service, listed_names, refused

from meshwright.control.hyperpod.router import operations

MEDIA = "application/x-amz-json-1.1"
INVALID = "ValidationException"
THEIRS = "arn:aws:sagemaker:us-east-1:000000000000:cluster/000000000000"


def tag(key: str, value: str) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value}]


CREATE_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"InstanceGroups": [group(), group(InstanceGroupName="more")]}, "Validation", "one group"),
    (
        {"InstanceGroups": [group(InstanceGroupName="hot-spares")]},
        "Validation",
        "meshwright:spares",
    ),
    ({"InstanceGroups": [group(0)]}, "Validation", "one node"),
    ({"InstanceGroups": [group(6700)]}, "ResourceLimit", "6250"),
    ({"InstanceGroups": [group(InstanceType="ml.t3.medium")]}, "Validation", "ml.trn2.48xlarge"),
    ({"InstanceGroups": [group(InstanceType="trn2")]}, "Validation", "ml. before"),
    ({"InstanceGroups": [group(ThreadsPerCore=2)]}, "Validation", "ThreadsPerCore"),
    (
        {"InstanceGroups": [group(ExecutionRole="arn:aws:iam::0:role/" + "x" * 300)]},
        "Validation",
        "ExecutionRole",
    ),
    ({"NodeRecovery": "Automatic"}, "Validation", "NodeRecovery"),
    ({"VpcConfig": {"SecurityGroupIds": ["sg-1"], "Subnets": ["s-1"]}}, "Validation", "VpcConfig"),
    ({"Tags": tag("meshwright:colour", "red")}, "Validation", "meshwright:engine"),
    ({"Tags": tag("meshwright:seed", "x")}, "Validation", "whole number"),
    ({"Tags": tag("meshwright:speed", "inf")}, "Validation", "speed"),
    ({"Tags": tag("meshwright:engine", "cloud")}, "Validation", "engine"),
    ({"Tags": tag("meshwright:engine", "kubernetes")}, "Validation", "engine"),
    ({"Tags": tag("meshwright:engine", "local")}, "Validation", "instance"),
    ({"Tags": tag("meshwright:spares", "9")}, "Validation", "spares"),
    ({"Tags": tag("hyperpod:role", "x")}, "Validation", "hyperpod:"),
    ({"ClusterName": "kept"}, "ResourceInUse", "kept"),
]


@pytest.mark.parametrize(("asked", "code", "words"), CREATE_REFUSED)
def test_a_cluster_that_cannot_be(
    client: Any, cluster: str, asked: dict[str, Any], code: str, words: str
) -> None:
    del cluster
    call = {"ClusterName": "never", "InstanceGroups": [group()], **asked}
    said = refused(client.create_cluster, **call)
    assert said[0].startswith(code) and words in said[1], said
    assert listed_names(client, NameContains="never") == []


NODE = "i-" + "0" * 17
EVENT = "00000000-0000-4000-8000-000000000001"
ABSENT_REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("describe_cluster", {}),
    ("update_cluster", {"InstanceGroups": [group()]}),
    ("delete_cluster", {}),
    ("list_cluster_nodes", {}),
    ("describe_cluster_node", {"NodeId": NODE}),
    ("batch_replace_cluster_nodes", {"NodeIds": [NODE]}),
    ("batch_reboot_cluster_nodes", {"NodeIds": [NODE]}),
    ("batch_delete_cluster_nodes", {"NodeIds": [NODE]}),
    ("update_cluster_software", {}),
    ("list_cluster_events", {}),
    ("describe_cluster_event", {"EventId": EVENT}),
]


@pytest.mark.parametrize("name", ["absent", THEIRS])
@pytest.mark.parametrize(("call", "asked"), ABSENT_REFUSED)
def test_a_cluster_that_is_not_there(
    client: Any, call: str, asked: dict[str, Any], name: str
) -> None:
    code, message = refused(getattr(client, call), ClusterName=name, **asked)
    assert code == "ResourceNotFound" and name in message


KEPT_REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("describe_cluster_node", {}, INVALID, "NodeLogicalId"),
    ("describe_cluster_node", {"NodeId": NODE}, "ResourceNotFound", NODE),
    ("describe_cluster_node", {"NodeId": NODE, "NodeLogicalId": "kept-0"}, INVALID, "one of"),
    ("describe_cluster_event", {"EventId": EVENT}, "ResourceNotFound", EVENT),
    ("list_cluster_events", {"NodeId": NODE}, "ResourceNotFound", NODE),
    ("list_cluster_events", {"InstanceGroupName": "other"}, "ResourceNotFound", "workers"),
    ("list_cluster_events", {"NextToken": "what"}, INVALID, "NextToken"),
    ("list_cluster_nodes", {"NextToken": "WyJhIiwgMV0="}, INVALID, "NextToken"),
    ("batch_reboot_cluster_nodes", {}, INVALID, "NodeIds"),
    ("update_cluster", {}, INVALID, "InstanceGroups"),
    ("update_cluster", {"InstanceGroups": [group(InstanceGroupName="other")]}, INVALID, "workers"),
    ("update_cluster", {"InstanceGroups": [group(InstanceType="ml.p5.48xlarge")]}, INVALID, "trn2"),
    (
        "update_cluster",
        {"InstanceGroups": [group(ImageReleaseVersion="7.0.0")]},
        INVALID,
        "UpdateClusterSoftware",
    ),
    (
        "update_cluster",
        {"InstanceGroups": [group()], "InstanceGroupsToDelete": ["workers"]},
        INVALID,
        "InstanceGroupsToDelete",
    ),
    (
        "update_cluster_software",
        {"InstanceGroups": [{"InstanceGroupName": "other"}]},
        INVALID,
        "workers",
    ),
    (
        "update_cluster_software",
        {
            "ImageId": "ami-12345678",
            "InstanceGroups": [{"InstanceGroupName": "workers", "ImageReleaseVersion": "2.0.0"}],
        },
        INVALID,
        "once",
    ),
    (
        "update_cluster_software",
        {
            "DeploymentConfig": {
                "RollingUpdatePolicy": {
                    "MaximumBatchSize": {"Type": "CAPACITY_PERCENTAGE", "Value": 101}
                }
            }
        },
        INVALID,
        "percent",
    ),
    (
        "update_cluster_software",
        {"DeploymentConfig": {"AutoRollbackConfiguration": [{"AlarmName": "a"}]}},
        INVALID,
        "AutoRollbackConfiguration",
    ),
]


@pytest.mark.parametrize(("call", "asked", "code", "words"), KEPT_REFUSED)
def test_what_cannot_be_asked_of_a_cluster(
    client: Any, cluster: str, call: str, asked: dict[str, Any], code: str, words: str
) -> None:
    said = refused(getattr(client, call), ClusterName=cluster, **asked)
    assert said[0] == code and words in said[1], said


def test_nothing_is_done_to_a_cluster_that_is_busy(client: Any) -> None:
    client.create_cluster(ClusterName="busy", InstanceGroups=[group(3)])
    in_service(client, "busy")
    wait = {"WaitIntervalInSeconds": 3600}
    asked = {"InstanceGroupName": "workers", "ImageReleaseVersion": "9.0.0"}
    call = {"ClusterName": "busy", "InstanceGroups": [asked], "DeploymentConfig": wait}
    client.update_cluster_software(**call)
    assert client.describe_cluster(ClusterName="busy")["ClusterStatus"] == "SystemUpdating"
    assert refused(client.update_cluster_software, **call)[0] == "ConflictException"
    said = refused(client.update_cluster, ClusterName="busy", InstanceGroups=[group(1)])
    assert said[0] == "ConflictException"
    nodes = client.batch_reboot_cluster_nodes(ClusterName="busy", NodeLogicalIds=["busy-2"])
    assert nodes["FailedNodeLogicalIds"][0]["ErrorCode"] == "InvalidInstanceStatus"


def test_what_is_no_request_of_its(service: Service) -> None:
    http = service.http

    def post(target: str, body: bytes, **headers: str) -> httpx.Response:
        sent = {"X-Amz-Target": target, "Content-Type": MEDIA, **headers}
        return http.post("/", content=body, headers=sent)

    other = post("SageMaker.CreateEndpoint", b"{}")
    assert other.json()["__type"] == "UnknownOperationException"
    assert all(name in other.json()["message"] for name in operations())
    assert post("Glue.ListClusters", b"{}").json()["__type"] == "UnknownOperationException"
    for body in (b"{", b"[]", b'{"MaxResults": NaN}', b"[" * 100_000, b"\xff"):
        found = post("SageMaker.ListClusters", body)
        assert (found.status_code, found.json()["__type"]) == (400, "SerializationException"), body
    form = {"Content-Type": "text/plain"}
    assert (
        post("SageMaker.ListClusters", b"{}", **form).json()["__type"] == "SerializationException"
    )
    site = post("SageMaker.ListClusters", b"{}", Origin="http://elsewhere.example")
    assert (site.status_code, site.json()["__type"]) == (403, "AccessDeniedException")
    good = post("SageMaker.ListClusters", b'{"MaxResults": 1}')
    assert good.headers["content-type"] == MEDIA and good.headers["x-amzn-requestid"]
    assert isinstance(good.json()["ClusterSummaries"][0]["CreationTime"], float)
