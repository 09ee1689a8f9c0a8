"""Amazon's own client drives a real service: every operation, and lists of more than a page."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hyperpod_service import (
    LIMIT_S,
    ROLE,
    Service,
    group,
    in_service,
    listed_names,
    refused,
    until,
)

TRN2 = "ml.trn2.48xlarge"


def test_a_cluster_lives_and_ends(client: Any, service: Service) -> None:
    scripts = {"SourceS3Uri": "s3://sagemaker-any/", "OnCreate": "on_create.sh"}
    arn = client.create_cluster(
        ClusterName="life",
        InstanceGroups=[group(2, LifeCycleConfig=scripts, ImageReleaseVersion="3.1.4")],
        Tags=[{"Key": "team", "Value": "red"}, {"Key": "meshwright:spares", "Value": "2"}],
        NodeRecovery="None",
    )["ClusterArn"]
    found = in_service(client, "life")
    assert found["ClusterArn"] == arn
    assert found == {
        **client.describe_cluster(ClusterName=arn),
        "ResponseMetadata": found["ResponseMetadata"],
    }
    workers, spares = found["InstanceGroups"]
    assert (workers["InstanceGroupName"], workers["InstanceType"]) == (
        "workers",
        "ml.trn2.48xlarge",
    )
    assert (workers["CurrentCount"], workers["TargetCount"]) == (2, 2)
    assert (workers["ExecutionRole"], workers["LifeCycleConfig"]) == (ROLE, scripts)
    assert workers["CurrentImageReleaseVersion"] == "3.1.4"
    assert (spares["InstanceGroupName"], spares["TargetCount"]) == ("spares", 1)
    ours = service.http.get("/v1/clusters/life").json()
    assert (ours["engine"], ours["chips"], ours["spares"]) == ("simulated", 34, 2)
    assert ours["spec"]["labels"]["team"] == "red"

    client.update_cluster(ClusterName="life", InstanceGroups=[group(3)])
    assert in_service(client, arn)["InstanceGroups"][0]["TargetCount"] == 3
    ours = service.http.get("/v1/clusters/life").json()
    assert ours["spec"]["labels"]["team"] == "red"

    assert client.delete_cluster(ClusterName="life")["ClusterArn"] == arn
    gone = until(lambda: listed_names(client), lambda names: "life" not in names)
    assert "life" not in gone
    assert refused(client.describe_cluster, ClusterName=arn)[0] == "ResourceNotFound"


def test_clusters_come_in_pages(client: Any) -> None:
    for number in range(5):
        client.create_cluster(ClusterName=f"Page-{4 - number}", InstanceGroups=[group(1)])
    wanted = [f"Page-{number}" for number in range(5)]
    for sort, order, expected in (
        ("NAME", "Ascending", wanted),
        ("NAME", "Descending", wanted[::-1]),
        ("CREATION_TIME", "Ascending", wanted[::-1]),
        ("CREATION_TIME", "Descending", wanted),
    ):
        asked = {"NameContains": "Page-", "SortBy": sort, "SortOrder": order, "MaxResults": 2}
        pages = list(client.get_paginator("list_clusters").paginate(**asked))
        assert [len(page["ClusterSummaries"]) for page in pages] == [2, 2, 1]
        assert [
            one["ClusterName"] for page in pages for one in page["ClusterSummaries"]
        ] == expected
    assert listed_names(client, NameContains="page-") == []
    now_s = time.time()  # boto3 sends whole seconds
    assert listed_names(client, NameContains="Page-", CreationTimeAfter=now_s + 60) == []
    assert len(listed_names(client, NameContains="Page-", CreationTimeBefore=now_s + 60)) == 5
    assert listed_names(client, NameContains="Page-", CreationTimeBefore=now_s - 3600) == []


def test_nodes_come_in_pages(client: Any, cluster: str) -> None:
    for order in ("Ascending", "Descending"):
        asked = {"ClusterName": cluster, "MaxResults": 3, "SortOrder": order}
        asked |= {"IncludeNodeLogicalIds": True}
        pages = list(client.get_paginator("list_cluster_nodes").paginate(**asked))
        assert [len(page["ClusterNodeSummaries"]) for page in pages] == [3, 1]
        names = [one["NodeLogicalId"] for page in pages for one in page["ClusterNodeSummaries"]]
        assert sorted(names) == [f"kept-{number}" for number in range(4)]
        assert names == sorted(names, reverse=order == "Descending")
    none = client.list_cluster_nodes(ClusterName=cluster, InstanceGroupNameContains="other")
    assert none["ClusterNodeSummaries"] == []
    first = client.list_cluster_nodes(ClusterName=cluster)["ClusterNodeSummaries"][0]
    late = client.list_cluster_nodes(ClusterName=cluster, CreationTimeAfter=time.time() + 60)
    assert late["ClusterNodeSummaries"] == []
    by_id = client.describe_cluster_node(ClusterName=cluster, NodeId=first["InstanceId"])
    by_name = client.describe_cluster_node(ClusterName=cluster, NodeLogicalId="kept-0")
    assert by_id["NodeDetails"] == by_name["NodeDetails"]
    assert by_id["NodeDetails"]["InstanceStatus"] == {"Status": "Running"}


def test_events_come_in_pages(client: Any, cluster: str) -> None:
    every = client.list_cluster_events(ClusterName=cluster, MaxResults=100)["Events"]
    times = [event["EventTime"] for event in every]
    assert times == sorted(times, reverse=True)
    pages = client.get_paginator("list_cluster_events").paginate(
        ClusterName=cluster, SortOrder="Ascending", PaginationConfig={"PageSize": 3}
    )
    shown = [event for page in pages for event in page["Events"]]
    assert shown == every[::-1]
    for event in shown:
        one = client.describe_cluster_event(ClusterName=cluster, EventId=event["EventId"])
        details = one["EventDetails"]
        assert {key: details[key] for key in event} == event
    node = client.list_cluster_nodes(ClusterName=cluster)["ClusterNodeSummaries"][1]["InstanceId"]
    of_node = client.list_cluster_events(ClusterName=cluster, NodeId=node)["Events"]
    assert of_node == [event for event in every if event.get("InstanceId") == node] != []
    for kind in ("Cluster", "Instance", "InstanceGroup"):
        found = client.list_cluster_events(ClusterName=cluster, ResourceType=kind)["Events"]
        assert found == [event for event in every if event["ResourceType"] == kind]
    now_s = time.time()
    for after, before, count in ((-60, 60, 5), (60, 120, 0), (-120, -60, 0)):
        bounds = {"EventTimeAfter": now_s + after * 60, "EventTimeBefore": now_s + before * 60}
        found = client.list_cluster_events(ClusterName=cluster, MaxResults=5, **bounds)["Events"]
        assert found == every[:count]


def test_nodes_are_rebooted_replaced_and_deleted(client: Any) -> None:
    client.create_cluster(ClusterName="nodes", InstanceGroups=[group(4)])
    in_service(client, "nodes")
    before = ids(client)
    absent = "i-" + "0" * 17
    answer = client.batch_replace_cluster_nodes(
        ClusterName="nodes", NodeIds=[before[1], before[1], absent]
    )
    assert answer["Successful"] == [before[1]]
    assert [one["ErrorCode"] for one in answer["Failed"]] == ["InstanceIdNotFound"]
    after = until(lambda: ids(client), lambda seen: seen[1] != before[1])
    assert [after[0], *after[2:]] == [before[0], *before[2:]]
    asked = {"ClusterName": "nodes", "NodeLogicalIds": ["nodes-0", "nodes-9"]}
    answer = client.batch_reboot_cluster_nodes(**asked)
    assert answer["SuccessfulNodeLogicalIds"] == ["nodes-0"]
    assert [one["NodeLogicalId"] for one in answer["FailedNodeLogicalIds"]] == ["nodes-9"]
    again = client.batch_reboot_cluster_nodes(**asked)  # as a client does that had no answer
    codes = {one["NodeLogicalId"]: one["ErrorCode"] for one in again["FailedNodeLogicalIds"]}
    assert codes["nodes-0"] == "InvalidInstanceStatus"
    told = client.describe_cluster_node(ClusterName="nodes", NodeLogicalId="nodes-0")
    assert told["NodeDetails"]["InstanceStatus"]["Status"] == "Pending"
    until(lambda: statuses(client), lambda seen: seen == ["Running"] * 4)
    assert ids(client) == after

    answer = client.batch_delete_cluster_nodes(ClusterName="nodes", NodeIds=[after[0], after[3]])
    assert answer["Successful"] == [after[3]]
    assert [one["Code"] for one in answer["Failed"]] == ["InvalidNodeStatus"]
    busy = client.batch_delete_cluster_nodes(ClusterName="nodes", NodeIds=[after[2], absent])
    assert "Successful" not in busy or ids(client) != after[:3]
    assert busy["Failed"][0]["Code"] == "NodeIdNotFound"
    in_service(client, "nodes")
    assert ids(client)[:2] == after[:2]


def ids(client: Any) -> list[str]:
    found = client.list_cluster_nodes(ClusterName="nodes", SortBy="NAME")["ClusterNodeSummaries"]
    return [node["InstanceId"] for node in found]


def statuses(client: Any) -> list[str]:
    found = client.list_cluster_nodes(ClusterName="nodes", SortBy="NAME")["ClusterNodeSummaries"]
    return [node["InstanceStatus"]["Status"] for node in found]


def test_a_cluster_of_another_client_is_seen(client: Any, service: Service) -> None:
    spec = {"name": "ours", "instance": "trn2u", "nodes": 2, "spares": 1}
    service.http.post("/v1/clusters", json=spec).raise_for_status()
    groups = in_service(client, "ours")["InstanceGroups"]
    assert [one["InstanceGroupName"] for one in groups] == ["nodes", "spares"]
    assert groups[0]["InstanceType"] == "ml.trn2u.48xlarge"
    nodes = client.list_cluster_nodes(ClusterName="ours")["ClusterNodeSummaries"]
    assert [node["InstanceGroupName"] for node in nodes] == ["nodes", "nodes", "spares"]
    last = client.batch_delete_cluster_nodes(ClusterName="ours", NodeIds=[nodes[1]["InstanceId"]])
    assert last["Failed"][0]["Code"] == "InvalidNodeStatus"


def test_the_command_line_of_aws(service: Service, cluster: str, tmp_path: Path) -> None:
    aws = shutil.which("aws")
    if aws is None or subprocess.run([aws, "--version"], capture_output=True).returncode:
        pytest.skip("there is no aws here")
    how = ["--endpoint-url", service.url, "--query", "ClusterStatus", "--output", "text"]
    said = subprocess.run(
        [aws, "sagemaker", "describe-cluster", "--cluster-name", cluster, *how],
        env={
            "PATH": str(Path(aws).parent) + ":/usr/bin:/bin",
            "HOME": str(tmp_path),
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert said.stdout.strip() == "InService", said.stderr
