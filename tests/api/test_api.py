"""The service as its users meet it: requests and answers, over a real socket."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from api_service import Service, job, wait_for

from meshwright.control.figures import FIGURE_NAMES


@pytest.fixture(scope="module")
def sim(service: Service) -> dict[str, Any]:
    """64 chips and one spare; its seconds are hundredths of ours."""
    return service.cluster("sim64", speed=100)


def test_a_cluster_is_made_with_a_log_and_what_was_measured(
    service: Service, sim: dict[str, Any]
) -> None:
    assert (sim["status"], sim["chips"], sim["spares"], sim["nodes"]) == ("READY", 65, 1, 5)
    assert sim["healthy_chips"] == 65
    assert sim["figures"]["fp8_tflops_median"] > sim["figures"]["compute_tflops_median"] > 100
    with service.client() as client:
        operations = [one for one in client.items("/operations") if one["cluster"] == sim["id"]]
        log = client.get(f"/operations/{operations[0]['id']}/log")
    phases = [line["phase"] for line in log]
    assert phases == [
        *("initialise", "wire", "mount", "compute", "memory", "bandwidth", "fp8", "drill", "ready")
    ]


@pytest.mark.usefixtures("sim")
def test_hardware_has_sixteen_figures_of_each_chip_and_the_wires_of_the_torus(
    service: Service,
) -> None:
    def sampled() -> dict[str, Any] | None:
        with service.client() as client:
            found: dict[str, Any] = client.get("/clusters/sim64/hardware")
        return found if found["sampled_at"] else None

    found = wait_for(sampled)
    chips = [chip for node in found["nodes"] for chip in node["chips"]]
    assert len(chips) == 65 and sum(chip["spare"] for chip in chips) == 1
    assert all(tuple(chip["figures"]) == FIGURE_NAMES for chip in chips)
    assert all(20 < chip["figures"]["temperature_c"] < 100 for chip in chips)
    assert len(found["links"]) == 4 * 32 + 64  # four tori of 4 x 4, and rings through all four
    for node, chip in ((0, 0), (3, 15)):
        own = [link for link in found["links"] if [node, chip] in link["ends"]]
        assert len(own) == 6


@pytest.mark.usefixtures("sim")
def test_a_job_runs_to_its_end_and_tells_of_it(service: Service) -> None:
    with service.client() as client:
        found = client.send("POST", "/jobs", {"cluster": "sim64", "job": job(steps=40)})
        assert found["status"] == "QUEUED" and found["ranks"] == 32 and found["spares"] == 1
        done = service.job_at(found["id"], "SUCCEEDED")
        assert done["step"] == 40 and done["loss"] > 0
        assert len(done["placement"]) == 33
        assert done["placement"][-1] == [4, 0]  # its spare stands where spares are held
        lines = client.get(f"/jobs/{found['id']}/metrics")
        assert lines[-1]["step"] == 40
        kinds = [event["kind"] for event in client.get(f"/jobs/{found['id']}/events")]
        assert kinds[:2] == ["job_submitted", "job_status"] and "run_started" in kinds
        free = client.get("/clusters/sim64")
        assert found["id"] not in free["jobs"]


def test_commits_are_sealed_by_the_key_of_the_cluster(service: Service) -> None:
    key = "file:/somewhere/key"
    service.cluster("sealed", nodes=1, spares=0, speed=1000, encryption={"key": key})
    body = job(steps=2, dp_shard=8)
    body["cluster"]["spares"], body["resilience"]["redundancy"] = 0, "none"
    own = {**body, "checkpoint": {"encrypt": "file:/its/own"}}
    with service.client() as client:
        for one, wanted in ((body, key), (own, "file:/its/own")):
            found = client.send("POST", "/jobs", {"cluster": "sealed", "job": one})
            said = client.get(f"/jobs/{found['id']}")["job"]["checkpoint"]["encrypt"]
            assert said == wanted


def test_what_waits_says_why_and_starts_when_it_can(service: Service) -> None:
    service.cluster("crowded", nodes=1, spares=0, speed=20)
    body: dict[str, Any] = {"cluster": "crowded", "job": job(100_000, dp_shard=8)}
    body["job"]["cluster"]["spares"] = 0
    body["job"]["resilience"]["redundancy"] = "none"
    with service.client() as client:
        first, second, third = (client.send("POST", "/jobs", body)["id"] for _ in range(3))
        for one in (first, second):
            service.job_at(one, "RUNNING", "STARTING")
        why = client.get(f"/jobs/{third}/explain")
        assert why["free_chips"] == 0 and why["needed_chips"] == 8
        assert why["sentence"] == (
            "waits: needs 8 chips, and 0 of 16 are free; 16 are held by other jobs"
        )
        client.send("POST", f"/jobs/{first}/stop")
        service.job_at(first, "STOPPED")
        service.job_at(third, "RUNNING", "STARTING")
        for one in (second, third):
            client.send("POST", f"/jobs/{one}/stop")
            service.job_at(one, "STOPPED")
        again = service.raw("POST", f"/v1/jobs/{third}/stop")
        assert again.status_code == 409 and "STOPPED already" in again.json()["title"]


def test_a_write_with_a_key_is_done_once(service: Service) -> None:
    headers = {"Idempotency-Key": "the-same"}
    body = {"name": "only-once", "nodes": 1, "spares": 0}
    first, second = (
        service.raw("POST", "/v1/clusters", json=body, headers=headers) for _ in range(2)
    )
    assert first.status_code == second.status_code == 202
    assert first.json() == second.json()
    other = service.raw("POST", "/v1/clusters", json={**body, "name": "other"}, headers=headers)
    assert other.status_code == 409 and "Idempotency-Key" in other.json()["title"]
    without = service.raw("POST", "/v1/clusters", json=body)
    assert without.status_code == 409 and "only-once" in without.json()["title"]
    service.done(first.json()["operation"]["id"])


def test_many_at_once_with_one_key_make_one(service: Service) -> None:
    answers: list[int] = []

    def ask() -> None:
        headers = {"Idempotency-Key": "many-at-once"}
        body = {"name": "many-at-once", "nodes": 1, "spares": 0}
        answers.append(service.raw("POST", "/v1/clusters", json=body, headers=headers).status_code)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [202] * 8
    with service.client() as client:
        assert [one["name"] for one in client.items("/clusters")].count("many-at-once") == 1


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"name": "x", "nodes": 0}, 400, "nodes"),
        ({"name": "x", "nodse": 4}, 400, "nodse"),
        ({"name": "../x"}, 400, "name"),
        ({"name": "x\n"}, 400, "name"),
        ({"name": "x", "spares": 5}, 400, "spares = 5: 64 chips take 0 to 4"),
        ({"name": "x", "instance": "trn9"}, 400, "trn9"),
        ({"name": "x", "engine": "kubernetes"}, 400, "engine"),
        ({"name": "x", "labels": {"a": "b\x00"}}, 400, "labels"),
        ({}, 400, "name"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(
    service: Service, body: dict[str, Any], status: int, words: str
) -> None:
    answer = service.raw("POST", "/v1/clusters", json=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert words in answer.json()["title"]
    assert "\n" not in answer.json()["title"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"preset": "llama3-9b"}}, "model.preset"),
        ({"layout": {"tp": 3, "micro_batch": 1}}, "tp"),
        ({"layout": {"dp_shard": 128, "micro_batch": 1}, "cluster": {"ref": "local:128"}}, "128"),
        ({"jobs": {}}, "jobs"),
    ],
)
@pytest.mark.usefixtures("sim")
def test_a_job_that_cannot_run_is_refused(
    service: Service, change: dict[str, Any], words: str
) -> None:
    answer = service.raw("POST", "/v1/jobs", json={"cluster": "sim64", "job": {**job(), **change}})
    assert answer.status_code == 400 and words in answer.json()["title"]
    nowhere = service.raw("POST", "/v1/jobs", json={"cluster": "nowhere", "job": job()})
    assert nowhere.status_code == 404 and "nowhere" in nowhere.json()["title"]


@pytest.mark.usefixtures("sim")
def test_lists_come_in_pages_and_every_item_once(service: Service) -> None:
    for number in range(3):
        service.cluster(f"page-{number}", nodes=1, spares=0)
    with service.client() as client:
        by_one = list(client.items("/clusters", limit=1))
        whole = client.get("/clusters", limit=500)
    assert [one["id"] for one in by_one] == [one["id"] for one in whole["items"]]
    assert whole["cursor"] is None
    bad = service.raw("GET", "/v1/clusters?cursor=nonsense")
    assert bad.status_code == 400 and "cursor" in bad.json()["title"]


@pytest.mark.usefixtures("sim")
def test_events_come_as_they_happen_and_none_is_missed(service: Service) -> None:
    with service.client() as client:
        newest = client.get("/events", limit=500)[-1]["seq"]
        seen: list[dict[str, Any]] = []

        def listen() -> None:
            with service.client() as other:
                for event in other.events(newest):
                    seen.append(event)
                    if event["kind"] == "cluster_deleted":
                        return

        thread = threading.Thread(target=listen)
        thread.start()
        made = service.cluster("short-lived", nodes=1, spares=0)
        service.done(client.send("DELETE", "/clusters/short-lived")["operation"]["id"])
        thread.join(60)
        assert not thread.is_alive()
        kept = client.get("/events", after=newest, limit=500)
    upto = seen[-1]["seq"]
    assert seen == [event for event in kept if event["seq"] <= upto]
    mine = [event for event in seen if event["cluster"] == made["id"]]
    assert [event["seq"] for event in seen] == sorted({event["seq"] for event in seen})
    assert mine[0]["kind"] == "cluster_created"


def test_a_fault_shows_in_health_and_events_and_goes_when_cleared(service: Service) -> None:
    made = service.cluster("faulty", nodes=1, spares=0)
    with service.client() as client:
        body = {"kind": "chip_dead", "node": 0, "chip": 3}
        fault = client.send("POST", "/clusters/faulty/faults", body)

        def health() -> str:
            found = client.get("/clusters/faulty/hardware")
            return str(found["nodes"][0]["chips"][3]["health"])

        assert wait_for(lambda: health() == "FAILED")
        assert client.get("/clusters/faulty")["healthy_chips"] == 15
        kinds = [event["kind"] for event in client.get("/events", cluster="faulty", limit=500)]
        assert "chip_health" in kinds and "fault_asked" in kinds
        client.send("DELETE", f"/clusters/faulty/faults/{fault['id']}")
        assert wait_for(lambda: health() == "HEALTHY")
        assert made["healthy_chips"] == 16
        refused = service.raw("POST", "/v1/clusters/faulty/faults", json={**body, "chip": 16})
        assert refused.status_code == 400 and "chips 0 to 15" in refused.json()["title"]


def test_a_drained_node_lets_its_jobs_go_elsewhere(service: Service) -> None:
    service.cluster("drained", nodes=2, spares=0, speed=20)
    body: dict[str, Any] = {"cluster": "drained", "job": job(1_000_000, dp_shard=8)}
    body["job"]["cluster"]["spares"] = 0
    body["job"]["resilience"]["redundancy"] = "none"
    with service.client() as client:
        found = client.send("POST", "/jobs", body)
        before = service.job_at(found["id"], "RUNNING")
        assert {node for node, _ in before["placement"]} == {0}
        client.send("POST", "/clusters/drained/nodes/0/action", {"action": "drain"})

        def moved() -> bool:
            now = client.get(f"/jobs/{found['id']}")
            return now["status"] == "RUNNING" and {n for n, _ in now["placement"]} == {1}

        assert wait_for(moved)
        assert client.get(f"/jobs/{found['id']}")["restarts"] == 0
        node = client.get("/clusters/drained/hardware", node=0)["nodes"][0]
        assert wait_for(lambda: node["drained"])
        client.send("POST", f"/jobs/{found['id']}/stop")
        service.job_at(found["id"], "STOPPED")


@pytest.mark.usefixtures("sim")
def test_figures_have_a_history(service: Service) -> None:
    def grown() -> dict[str, Any] | None:
        with service.client() as client:
            found: dict[str, Any] = client.get(
                "/clusters/sim64/metrics", figure="power_w", node=1, grain_s=1
            )
        return found if len(found["times"]) >= 3 else None

    found = wait_for(grown)
    assert found["chips"] == list(range(16, 32)) and found["unit"] == "W"
    assert len(found["mean"]) == 16 and len(found["mean"][0]) == len(found["times"])
    assert all(value > 0 for line in found["mean"] for value in line)
    wrong = service.raw("GET", "/v1/clusters/sim64/metrics?figure=powr_w")
    assert wrong.status_code == 400 and 'did you mean "power_w"' in wrong.json()["title"]
    much = service.raw("GET", "/v1/clusters/sim64/metrics?figure=power_w&start=0")
    assert much.status_code == 400 and "coarser" in much.json()["title"]


def test_a_plan_is_answered_and_kept(service: Service) -> None:
    with service.client() as client:
        body = {"model": "llama3-8b", "cluster": "trn2u:64"}
        plan = client.send("POST", "/plans", body)
        assert plan["plan"]["best"][0]["step_time_s"] > 0
        assert client.get(f"/plans/{plan['id']}") == plan
    path = service.raw("POST", "/v1/plans", json={**body, "model": "/etc/passwd"})
    assert path.status_code == 400 and "no such preset" in path.json()["title"]


def test_pages_of_other_sites_are_refused(service: Service) -> None:
    strange = service.raw("GET", "/v1/clusters", headers={"Host": "evil.example"})
    assert strange.status_code == 403
    other = service.raw("POST", "/v1/jobs/job-1/stop", headers={"Origin": "http://evil.example"})
    assert other.status_code == 403
    plain = service.raw(
        "POST", "/v1/clusters", content=b'{"name": "x"}', headers={"Content-Type": "text/plain"}
    )
    assert plain.status_code == 400


def test_bodies_that_are_too_large_are_refused(service: Service) -> None:
    large = json.dumps({"name": "x" * (5 << 20)})
    answer = service.raw(
        "POST", "/v1/clusters", content=large, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 413


@pytest.mark.usefixtures("sim")
def test_logs_are_of_the_job_alone(service: Service) -> None:
    with service.client() as client:
        found = client.send("POST", "/jobs", {"cluster": "sim64", "job": job(steps=2)})
        service.job_at(found["id"], "SUCCEEDED")
    for name in ("../events.jsonl", "..%2f..%2fservice.db", "/etc/passwd"):
        answer = service.raw("GET", f"/v1/jobs/{found['id']}/logs?name={name}")
        assert answer.status_code == 404


def test_a_home_has_one_service(service: Service) -> None:
    second = Service(service.home)
    with pytest.raises(AssertionError, match="another service has it"):
        second.start()
    assert second.process is not None and second.process.wait(30) == 2


def test_bulk_actions_go_on_by_themselves(service: Service) -> None:
    service.cluster("bulk-1", nodes=1, spares=0)
    with service.client() as client:
        results = client.send(
            "POST", "/clusters:bulk", {"action": "delete", "clusters": ["bulk-1", "bulk-2"]}
        )
        assert [one["ok"] for one in results] == [True, False]
        assert "bulk-2: there is none" in results[1]["error"]
        service.done(results[0]["operation"])
        assert "bulk-1" not in [one["name"] for one in client.items("/clusters")]
