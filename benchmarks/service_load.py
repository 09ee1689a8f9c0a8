"""Requests at fixed times, whatever becomes of those before: run by `service.py` as a process.

Writes one JSON object a request: its route, whether it writes, seconds from the moment it was due
(not from when it could be sent) to the last byte of its answer, and its status.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from typing import Any

import httpx

_LINES = 64  # connections
_LIMIT_S = 30.0


class Load:
    """Draws requests; remembers the jobs and faults that it may end."""

    def __init__(self, clusters: list[str], job: dict[str, Any], seed: int) -> None:
        self._draw, self._clusters, self._job = random.Random(seed), clusters, job
        self.jobs: list[str] = []
        self.faults: list[tuple[str, str]] = []
        self._number = 0

    def next(self) -> tuple[str, str, str, dict[str, Any] | None]:
        """Route, method, path and body; four of five read."""
        draw, cluster = self._draw, self._draw.choice(self._clusters)
        self._number += 1
        if draw.random() < 0.8:
            return draw.choice(self._reads(cluster))
        kinds = ["submit", "inject"] + ["stop"] * bool(self.jobs) + ["clear"] * bool(self.faults)
        kind = draw.choice(kinds)
        if kind == "submit":
            body = {"cluster": cluster, "job": self._job, "name": f"load-{self._number}"}
            return kind, "POST", "/v1/jobs", body
        if kind == "inject":
            chip: dict[str, Any] = {"node": draw.randrange(4), "chip": draw.randrange(16)}
            chip |= {"kind": "chip_slow", "severity": 0.1}
            return kind, "POST", f"/v1/clusters/{cluster}/faults", chip
        if kind == "stop":
            job = self.jobs.pop(draw.randrange(len(self.jobs)))
            return kind, "POST", f"/v1/jobs/{job}/stop", None
        where, fault = self.faults.pop(draw.randrange(len(self.faults)))
        return kind, "DELETE", f"/v1/clusters/{where}/faults/{fault}", None

    def took(self, kind: str, cluster: str, answer: dict[str, Any]) -> None:
        """Remember what was made."""
        if kind == "submit":
            self.jobs.append(answer["id"])
        elif kind == "inject":
            self.faults.append((cluster, answer["id"]))

    def _reads(self, cluster: str) -> list[tuple[str, str, str, None]]:
        at = f"/v1/clusters/{cluster}"
        found: list[tuple[str, str, str, None]] = [
            ("hardware", "GET", f"{at}/hardware", None),
            ("cluster", "GET", at, None),
            ("clusters", "GET", "/v1/clusters", None),
            ("jobs", "GET", "/v1/jobs?limit=50", None),
            ("events", "GET", f"/v1/events?cluster={cluster}&limit=100", None),
            ("history", "GET", f"{at}/metrics?figure=power_w", None),
        ]
        if self.jobs:
            job = self._draw.choice(self.jobs)
            found += [
                ("job", "GET", f"/v1/jobs/{job}", None),
                ("steps", "GET", f"/v1/jobs/{job}/metrics?limit=100", None),
            ]
        return found


async def run(url: str, load: Load, rate: float, seconds: float) -> None:
    """All requests of so many seconds, and their answers."""
    limits = httpx.Limits(max_connections=_LINES, max_keepalive_connections=_LINES)
    async with httpx.AsyncClient(
        base_url=url, limits=limits, timeout=_LIMIT_S, trust_env=False
    ) as client:
        begun, tasks = time.perf_counter(), []
        for number in range(int(rate * seconds)):
            due = begun + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(_one(client, load, due, number)))
        await asyncio.gather(*tasks)


async def _one(client: httpx.AsyncClient, load: Load, due: float, number: int) -> None:
    route, method, path, body = load.next()
    headers = {} if method == "GET" else {"Idempotency-Key": f"load-{number}-{due}"}
    try:
        answer = await client.request(method, path, json=body, headers=headers)
        status = answer.status_code
        if answer.is_success and route in ("submit", "inject"):
            load.took(route, path.split("/")[3] if route == "inject" else "", answer.json())
    except httpx.HTTPError:
        status = 0
    took = {"route": route, "write": method != "GET", "status": status}
    sys.stdout.write(json.dumps({**took, "s": time.perf_counter() - due}) + "\n")


def main() -> None:
    """As `service.py` calls it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("job", help="JSON of a job file")
    parser.add_argument("clusters", nargs="+")
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    load = Load(asked.clusters, json.loads(asked.job), seed=1)
    asyncio.run(run(asked.url, load, asked.rate, asked.seconds))


if __name__ == "__main__":
    main()
