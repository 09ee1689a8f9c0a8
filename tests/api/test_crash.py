"""The service is killed while it is busy: nothing that it accepted is lost, nothing is done twice.

By default a few times; `CHAOS=all` a hundred.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_service import LIMIT_S, Service, job, running, wait_for

from meshwright.base.events import Kind
from meshwright.conduct.rundir import read_lines

CRASHES = 100 if os.environ.get("CHAOS") == "all" else 3
STEPS = 3
LOCAL_JOB: dict[str, Any] = {
    "job": {"name": "real", "steps": 1_000_000, "eval_every": 1_000_000},
    "model": {
        "family": "llama",
        "layers": 1,
        "hidden": 16,
        "heads": 2,
        "kv_heads": 2,
        "ffn_hidden": 32,
        "vocab": 300,
        "max_seq_len": 32,
    },
    "data": {"source": "", "seq_len": 32, "global_batch": 2},
    "layout": {"dp_replicate": 2, "micro_batch": 1},
    "cluster": {"ref": "local:2"},
    "checkpoint": {"every": 1000},
}


@dataclass
class Load:
    """Writes, one after the other, each sent again until it is answered; what was answered."""

    service: Service
    seed: int
    over: threading.Event = field(default_factory=threading.Event)
    accepted: dict[str, dict[str, Any]] = field(default_factory=dict)  # by idempotency key

    def run(self) -> None:
        draw, number = random.Random(self.seed), 0
        while not self.over.is_set():
            number += 1
            key = f"load-{self.seed}-{number}"
            answer = self.send(key, _body_of(key))
            if answer is not None:
                self.accepted[key] = answer
            time.sleep(draw.uniform(0.02, 0.2))

    def send(self, key: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer, whenever the service is there to give it."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                answer = self.service.raw(
                    "POST", "/v1/jobs", json=body, headers={"Idempotency-Key": key}
                )
            except httpx.TransportError:
                if self.over.is_set():
                    return None
                time.sleep(0.05)
                continue
            assert answer.status_code == 201, answer.text
            found: dict[str, Any] = answer.json()
            return found
        raise AssertionError(f"{key}: no answer")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(6):
        lines = (f"def f_{number}_{line}(x):\n    return x + {line}\n\n" for line in range(90))
        (folder / f"m{number}.py").write_text("".join(lines))
    return folder


def test_kills_under_load_lose_nothing_and_double_nothing(tmp_path: Path, corpus: Path) -> None:
    draw = random.Random(8)
    with running(tmp_path / "crash") as service:
        service.cluster("sim", nodes=2, spares=0, speed=1000)
        service.cluster("here", engine="local", instance="local", nodes=1, spares=0)
        LOCAL_JOB["data"]["source"] = str(corpus)
        with service.client() as client:
            real = client.send("POST", "/jobs", {"cluster": "here", "job": LOCAL_JOB})["id"]
        service.job_at(real, "RUNNING")
        loads = [Load(service, seed) for seed in (1, 2)]
        threads = [threading.Thread(target=load.run) for load in loads]
        for thread in threads:
            thread.start()
        made = []
        for number in range(CRASHES):
            with service.client() as client:  # one that is under way when the crash comes
                name = f"made-{number}"
                made.append(name)
                client.send("POST", "/clusters", {"name": name, "nodes": 1, "spares": 0})
            time.sleep(draw.uniform(0, 0.7))
            service.kill()
            service.start()
        time.sleep(1.0)
        for load, thread in zip(loads, threads, strict=True):
            load.over.set()
            thread.join(LIMIT_S)
        _check_accepted(service, loads)
        _check_clusters(service, made)
        _check_real(service, real)


def _check_accepted(service: Service, loads: list[Load]) -> None:
    """Every job that was accepted is there once, ran once and ended."""
    accepted = {key: one for load in loads for key, one in load.accepted.items()}
    assert len(accepted) > 2 * CRASHES
    with service.client() as client:

        def ended() -> list[dict[str, Any]] | None:
            jobs = [one for one in client.items("/jobs", limit=500) if one["name"] in accepted]
            return jobs if all(one["status"] == "SUCCEEDED" for one in jobs) else None

        jobs = wait_for(ended)
        assert Counter(one["name"] for one in jobs) == Counter(accepted.keys())
        assert {one["id"] for one in jobs} == {one["id"] for one in accepted.values()}
        for one in jobs:
            assert one["attempt"] == 1 and one["restarts"] == 0, one
            run = Path(client.get(f"/jobs/{one['id']}")["run"])
            kinds = Counter(event["kind"] for event in read_lines(run / "events.jsonl"))
            assert kinds[Kind.RUN_STARTED] == kinds[Kind.RUN_FINISHED] == 1
        key, before = next(iter(accepted.items()))
        again = loads[0].send(key, _body_of(key))
        assert again == before  # as it was answered then


def _body_of(key: str) -> dict[str, Any]:
    body: dict[str, Any] = {"cluster": "sim", "name": key, "job": job(STEPS, dp_shard=2)}
    body["job"]["cluster"]["spares"] = 0
    body["job"]["resilience"]["redundancy"] = "none"
    return body


def _check_clusters(service: Service, made: list[str]) -> None:
    with service.client() as client:

        def ready() -> list[str] | None:
            found = [one for one in client.items("/clusters", limit=500) if one["name"] in made]
            names = [one["name"] for one in found if one["status"] == "READY"]
            return names if len(names) == len(made) else None

        assert sorted(wait_for(ready)) == sorted(made)


def _check_real(service: Service, real: str) -> None:
    """The processes of this machine never noticed, and what watches them has not lost a step."""
    with service.client() as client:
        found = client.get(f"/jobs/{real}")
        assert (found["status"], found["attempt"], found["restarts"]) == ("RUNNING", 1, 0)
        step = found["step"]
        assert wait_for(lambda: client.get(f"/jobs/{real}")["step"] > step)
        events = client.get(f"/jobs/{real}/events", limit=500)
        started = [event for event in events if event["kind"] == "run_started"]
        assert len(started) == 1
        client.send("POST", f"/jobs/{real}/stop")
        service.job_at(real, "STOPPED")
        saved = client.get(f"/jobs/{real}/checkpoints")
        assert saved[-1]["step"] == client.get(f"/jobs/{real}")["step"]
