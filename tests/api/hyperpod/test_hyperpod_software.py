"""Software is rolled out batch by batch; jobs move and go on, and a service may die meanwhile."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from hyperpod_service import Service, group, in_service, running, until

from meshwright.control.hyperpod.clusters import batch_size
from meshwright.control.hyperpod.shapes import Deployment, parse
from meshwright.control.reconcile.rollout import batches

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.toml"


def batch(kind: str, value: int) -> dict[str, Any]:
    size = {"Type": kind, "Value": value}
    return {"RollingUpdatePolicy": {"MaximumBatchSize": size}}


def ask(client: Any, name: str, release: str, **config: Any) -> None:
    wanted = {"InstanceGroupName": "workers", "ImageReleaseVersion": release}
    client.update_cluster_software(
        ClusterName=name, InstanceGroups=[wanted], DeploymentConfig=config
    )


def releases(client: Any, name: str) -> list[str]:
    found = client.list_cluster_nodes(ClusterName=name, SortBy="NAME")["ClusterNodeSummaries"]
    return [node["CurrentImageReleaseVersion"] for node in found]


def events(http: httpx.Client, name: str) -> list[dict[str, Any]]:
    return list(http.get("/v1/events", params={"cluster": name, "limit": 500}).json())


def updated(http: httpx.Client, name: str) -> list[int]:
    return [event["node"] for event in events(http, name) if event["kind"] == "software_updated"]


def phases(http: httpx.Client, name: str) -> list[str]:
    """The parts of the last roll-out, without those of self-tests."""
    found = [event for event in events(http, name) if event["kind"] == "operation_progress"]
    return [e["data"]["line"] for e in found if e["data"]["phase"] in ("drain", "wait", "resume")]


@pytest.mark.parametrize(
    ("config", "nodes", "size"),
    [
        ({}, 8, 1),
        (batch("INSTANCE_COUNT", 3), 8, 3),
        (batch("INSTANCE_COUNT", 30), 8, 8),
        (batch("CAPACITY_PERCENTAGE", 25), 8, 2),
        (batch("CAPACITY_PERCENTAGE", 1), 8, 1),
        (batch("CAPACITY_PERCENTAGE", 99), 8, 7),
        (batch("CAPACITY_PERCENTAGE", 100), 8, 8),
    ],
)
def test_how_many_at_a_time(config: dict[str, Any], nodes: int, size: int) -> None:
    assert batch_size(parse(Deployment, config), nodes) == size


def test_batches_take_each_node_once_and_in_order() -> None:
    assert batches([0, 1, 2, 5, 7], 2) == [[0, 1], [2, 5], [7]]
    assert batches([], 2) == []


def test_batches_wait_for_each_other(client: Any, service: Service) -> None:
    client.create_cluster(ClusterName="rolled", InstanceGroups=[group(3)])
    in_service(client, "rolled")
    http = service.http
    ask(client, "rolled", "2.0.0", **batch("INSTANCE_COUNT", 2), WaitIntervalInSeconds=1)
    found = in_service(client, "rolled")["InstanceGroups"][0]
    assert (found["SoftwareUpdateStatus"], found["ImageVersionStatus"]) == ("Succeeded", "UpToDate")
    assert releases(client, "rolled") == ["2.0.0"] * 3
    assert updated(http, "rolled") == [0, 1, 2]
    assert phases(http, "rolled") == [
        "nodes 0, 1 take no more work",
        "nodes 0, 1 have 2.0.0",
        "1 s to the next batch",
        "nodes 2 take no more work",
        "nodes 2 have 2.0.0",
    ]
    client.update_cluster_software(ClusterName="rolled", ImageId="ami-0123456789abcdef0")
    found = in_service(client, "rolled")["InstanceGroups"][0]
    assert found["CurrentImageId"] == "ami-0123456789abcdef0"


def test_a_job_moves_and_is_not_started_again_for_a_fault(client: Any, service: Service) -> None:
    client.create_cluster(ClusterName="moves", InstanceGroups=[group(2)])
    in_service(client, "moves")
    http = service.http
    tables = tomllib.loads(QUICKSTART.read_text())
    asked = {"cluster": "moves", "job": tables, "overrides": ["job.steps=1000000"]}
    answer = http.post("/v1/jobs", json=asked)
    assert answer.status_code == 201, answer.text
    where = f"/v1/jobs/{answer.json()['id']}"
    until(lambda: http.get(where).json(), lambda job: job["status"] == "RUNNING")
    ask(client, "moves", "2.0.0")
    in_service(client, "moves")
    assert releases(client, "moves") == ["2.0.0"] * 2
    job = until(lambda: http.get(where).json(), lambda job: job["status"] == "RUNNING")
    assert (job["attempt"], job["restarts"]) == (3, 0)
    for node in http.get("/v1/clusters/moves/hardware").json()["nodes"]:
        assert not node["drained"]
    http.post(f"{where}/stop").raise_for_status()


def test_a_node_that_fails_stays_out_and_the_rest_goes_on(client: Any, service: Service) -> None:
    client.create_cluster(ClusterName="failing", InstanceGroups=[group(3)])
    in_service(client, "failing")
    http = service.http
    http.post("/v1/clusters/failing/nodes/2/action", json={"action": "drain"}).raise_for_status()
    fault = {"kind": "chip_corrupt", "node": 1, "chip": 3}
    http.post("/v1/clusters/failing/faults", json=fault).raise_for_status()
    until(
        lambda: http.get("/v1/clusters/failing/faults").json()["items"][0]["status"],
        lambda s: s == "ACTIVE",
    )
    ask(client, "failing", "2.0.0", **batch("CAPACITY_PERCENTAGE", 100))
    found = in_service(client, "failing")
    assert found["InstanceGroups"][0]["SoftwareUpdateStatus"] == "Failed"
    assert found["FailureMessage"]
    assert releases(client, "failing") == ["2.0.0", "1.0.0", "1.0.0"]
    assert drained(http, "failing") == [1, 2]

    client.batch_replace_cluster_nodes(ClusterName="failing", NodeLogicalIds=["failing-1"])
    client.update_cluster_software(ClusterName="failing")  # again, on the nodes that lack it
    found = in_service(client, "failing")
    assert found["InstanceGroups"][0]["SoftwareUpdateStatus"] == "Succeeded"
    assert "FailureMessage" not in found
    assert releases(client, "failing") == ["2.0.0"] * 3
    assert drained(http, "failing") == [2]  # which a person had drained


def drained(http: httpx.Client, name: str) -> list[int]:
    nodes = http.get(f"/v1/clusters/{name}/hardware").json()["nodes"]
    return [node["number"] for node in nodes if node["drained"]]


def test_a_service_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        client = first.client
        client.create_cluster(ClusterName="torn", InstanceGroups=[group(4)])
        in_service(client, "torn")
        ask(client, "torn", "2.0.0")
        http = first.http
        until(lambda: updated(http, "torn"), lambda nodes: len(nodes) >= 2)
        first.process.kill()
    with running(tmp_path) as second:
        client = second.client
        in_service(client, "torn")
        http = second.http
        assert releases(client, "torn") == ["2.0.0"] * 4
        assert Counter(updated(http, "torn")) == Counter(range(4))
        assert drained(http, "torn") == []
