"""A real service in a process of its own, on a free port, and what tests ask of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from meshwright.control.client import Client

Found = TypeVar("Found")
PROGRAM = Path(sys.executable).with_name("meshwright")
LIMIT_S = 120.0  # of anything a test waits for: a guard against hanging, not a measure

# Of a simulated cluster: a job that runs for `steps` of its steps.
JOB: dict[str, Any] = {
    "job": {"name": "small", "steps": 50},
    "model": {"preset": "llama3-8b"},
    "data": {"source": "python-stdlib", "seq_len": 4096, "global_batch": 64},
    "layout": {"dp_shard": 8, "tp": 4, "micro_batch": 1, "precision": "bf16"},
    "cluster": {"ref": "local:32", "spares": 1},
    "resilience": {"redundancy": "shadow"},
}


def job(steps: int = 50, **layout: int) -> dict[str, Any]:
    """`JOB` with so many steps and another layout."""
    found: dict[str, Any] = json.loads(json.dumps(JOB))
    found["job"]["steps"] = steps
    if layout:
        found["layout"] = {"micro_batch": 1, "precision": "bf16", **layout}
        ranks = 1
        for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
            ranks *= layout.get(axis, 1)
        found["cluster"]["ref"] = f"local:{ranks}"
    return found


@dataclass
class Service:
    """One that runs; `url` changes when it is started again."""

    home: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen[str] | None = None
    url: str = ""
    log: list[Path] = field(default_factory=list)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.log.append(self.home / f"log-{len(self.log)}")
        command = [str(PROGRAM), "up", "--home", str(self.home / "svc"), "--port", "0", "--json"]
        with self.log[-1].open("w") as errors:
            self.process = subprocess.Popen(
                [*command, *self.options],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "MESHWRIGHT_CACHE": str(self.home / "cache")},
                start_new_session=True,
            )
        assert self.process.stdout is not None
        said = ""
        while not said.rstrip().endswith("}"):
            line = self.process.stdout.readline()
            if not line:
                self.process.stdout.close()
                raise AssertionError(self.log[-1].read_text())
            said += line
        self.process.stdout.close()
        self.url = json.loads(said)["url"]
        wait_for(self._answers)

    def kill(self) -> None:
        """As a crash does it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(LIMIT_S)

    def stop(self) -> None:
        """As a user does it."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(LIMIT_S)

    def client(self) -> Client:
        """One for this service."""
        return Client(self.url)

    def raw(self, method: str, path: str, **more: Any) -> httpx.Response:
        """One request as it is."""
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as client:
            return client.request(method, path, **more)

    def cluster(self, name: str = "one", **spec: Any) -> dict[str, Any]:
        """A cluster that is ready."""
        with self.client() as client:
            taken = client.send("POST", "/clusters", {"name": name, **spec})
            self.done(taken["operation"]["id"])
            found: dict[str, Any] = client.get(f"/clusters/{name}")
            return found

    def done(self, operation: str) -> dict[str, Any]:
        """An operation once it has ended well."""
        with self.client() as client:

            def ended() -> dict[str, Any] | None:
                found: dict[str, Any] = client.get(f"/operations/{operation}")
                assert found["status"] != "FAILED", found
                return found if found["status"] == "SUCCEEDED" else None

            return wait_for(ended)

    def job_at(self, job: str, *statuses: str) -> dict[str, Any]:
        """A job once it has one of these statuses."""
        with self.client() as client:

            def reached() -> dict[str, Any] | None:
                found: dict[str, Any] = client.get(f"/jobs/{job}")
                return found if found["status"] in statuses else None

            return wait_for(reached)

    def _answers(self) -> bool:
        try:
            answer = self.raw("GET", "/v1/service")
        except httpx.TransportError:
            assert self.process is not None and self.process.poll() is None
            return False
        return bool(answer.is_success and answer.json()["leader"])


def wait_for(look: Callable[[], Found | None], limit_s: float = LIMIT_S) -> Found:
    """What `look` finds at last."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {limit_s} s: {look()}")


@contextmanager
def running(home: Path, *options: str) -> Iterator[Service]:
    """A service while the block lasts."""
    service = Service(home, options)
    try:
        service.start()
        yield service
    finally:
        if service.process is not None:
            service.stop()
