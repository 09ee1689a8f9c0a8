"""Situations that users of other control planes have met, each for its whole kind."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

from api_service import Service, job, wait_for


def _long(ranks: int, spares: int = 0, redundancy: str = "none") -> dict[str, Any]:
    found = job(10_000_000, dp_shard=ranks)
    found["cluster"]["spares"] = spares
    found["resilience"]["redundancy"] = redundancy
    return found


def _submit(service: Service, cluster: str, body: dict[str, Any], **more: Any) -> str:
    with service.client() as client:
        return str(client.send("POST", "/jobs", {"cluster": cluster, "job": body, **more})["id"])


def _stop_all(service: Service, *jobs: str) -> None:
    with service.client() as client:
        for one in jobs:
            client.send("POST", f"/jobs/{one}/stop")
        for one in jobs:
            service.job_at(one, "STOPPED")


def test_what_cannot_be_seen_has_not_failed(service: Service) -> None:
    """Its controller cannot reach a healthy run: it is not started again, and one event says so."""
    service.cluster("blind", nodes=2, spares=0, speed=20)
    one = _submit(service, "blind", _long(8))
    service.job_at(one, "RUNNING")
    with service.client() as client:
        fault = {"kind": "node_unreachable", "node": 0}
        injected = client.send("POST", "/clusters/blind/faults", fault)
        assert wait_for(lambda: client.get(f"/jobs/{one}")["unknown_since"])
        before = client.get(f"/jobs/{one}")

        def node() -> dict[str, Any]:
            found: dict[str, Any] = client.get("/clusters/blind/hardware", node=0)["nodes"][0]
            return found

        assert wait_for(lambda: node()["status"] == "UNKNOWN")
        assert node()["health"] != "FAILED"
        time.sleep(3.0)
        now = client.get(f"/jobs/{one}")
        assert (now["status"], now["attempt"], now["restarts"]) == ("RUNNING", 1, 0)
        assert now["unknown_since"] == before["unknown_since"]
        events = client.get(f"/jobs/{one}/events", limit=500)
        told = [event["data"] for event in events if event["kind"] == "job_status"]
        assert [one["message"] for one in told if one.get("message")] == [now["message"]]
        assert now["message"]
        client.send("DELETE", f"/clusters/blind/faults/{injected['id']}")
        assert wait_for(lambda: client.get(f"/jobs/{one}")["unknown_since"] is None)
        seen = client.get(f"/jobs/{one}")
        assert wait_for(lambda: client.get(f"/jobs/{one}")["step"] > seen["step"])
        assert client.get(f"/jobs/{one}")["attempt"] == 1
    _stop_all(service, one)


def test_gangs_that_want_the_same_chips_never_hold_and_wait(service: Service) -> None:
    """Two gangs that each need all chips, asked for at once: one runs whole, the other waits."""
    service.cluster("gangs", nodes=2, spares=0, speed=100)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(_submit(service, "gangs", _long(32))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with service.client() as client:

        def settled() -> list[dict[str, Any]] | None:
            jobs = [client.get(f"/jobs/{one}") for one in found]
            return jobs if any(one["status"] == "RUNNING" for one in jobs) else None

        jobs = wait_for(settled)
        assert sorted(len(one["placement"]) for one in jobs) == [0, 32]
        assert sorted(one["status"] for one in jobs) == ["QUEUED", "RUNNING"]
        first = next(one["id"] for one in jobs if one["status"] == "RUNNING")
        second = next(one["id"] for one in jobs if one["status"] == "QUEUED")
    _stop_all(service, first)
    service.job_at(second, "RUNNING")
    _stop_all(service, second)


def test_gangs_are_placed_again_whole_or_not_at_all(service: Service) -> None:
    """A node of each of two gangs dies and there is one to spare: one runs again whole."""
    service.cluster("again", nodes=5, spares=0, speed=100)
    gangs = [_submit(service, "again", _long(32)) for _ in range(2)]
    with service.client() as client:
        for one in gangs:
            service.job_at(one, "RUNNING")
        for node in (0, 2):
            client.send("POST", "/clusters/again/faults", {"kind": "node_down", "node": node})

        def settled() -> list[dict[str, Any]] | None:
            jobs = [client.get(f"/jobs/{one}") for one in gangs]
            again = [one for one in jobs if one["restarts"] == 1]
            ready = len(again) == 2 and any(one["status"] == "RUNNING" for one in again)
            return jobs if ready else None

        jobs = wait_for(settled)
        time.sleep(1.0)
        jobs = [client.get(f"/jobs/{one}") for one in gangs]
        assert sorted(one["status"] for one in jobs) == ["QUEUED", "RUNNING"]
        assert sorted(len(one["placement"]) for one in jobs) == [0, 32]
        running = next(one for one in jobs if one["status"] == "RUNNING")
        assert {node for node, _ in running["placement"]} <= {1, 3, 4}
        waiting = next(one for one in jobs if one["status"] == "QUEUED")
        why = client.get(f"/jobs/{waiting['id']}/explain")
        assert why["unusable"] == {"are on nodes that are FAILED": 32}
    _stop_all(service, *gangs)


def test_an_end_is_an_end(service: Service) -> None:
    """Nothing leads out of a final state: no stop, no fault, no restart of the service's loop."""
    service.cluster("ended", nodes=1, spares=0, speed=1000)
    body = job(3, dp_shard=8)
    body["cluster"]["spares"], body["resilience"]["redundancy"] = 0, "none"
    one = _submit(service, "ended", body)
    with service.client() as client:
        done = service.job_at(one, "SUCCEEDED")
        assert service.raw("POST", f"/v1/jobs/{one}/stop").status_code == 409
        client.send("POST", "/clusters/ended/faults", {"kind": "node_down", "node": 0})
        assert wait_for(lambda: client.get("/clusters/ended")["healthy_chips"] == 0)
        now = client.get(f"/jobs/{one}")
        assert now["status"] == "SUCCEEDED" and now["ended_at"] == done["ended_at"]


def test_a_run_that_is_lost_again_and_again_is_given_up(service: Service) -> None:
    """Restarts are counted and bounded; what an unlucky rank costs is charged once."""
    service.cluster("unlucky", nodes=1, spares=0, speed=100)
    one = _submit(service, "unlucky", _long(8), max_restarts=1)
    with service.client() as client:
        for attempt in (1, 2):
            now = wait_for(partial(_running, service, one, attempt))
            chip = now["placement"][0][1]
            fault = {"kind": "chip_dead", "node": 0, "chip": chip}
            client.send("POST", "/clusters/unlucky/faults", fault)
        failed = service.job_at(one, "FAILED")
        assert failed["restarts"] == 1 and "started again 1 times" in failed["message"]


def _running(service: Service, one: str, attempt: int) -> dict[str, Any] | None:
    with service.client() as client:
        found: dict[str, Any] = client.get(f"/jobs/{one}")
    assert found["status"] != "FAILED", (found["message"], found["attempt"], found["step"])
    return found if (found["status"], found["attempt"]) == ("RUNNING", attempt) else None
