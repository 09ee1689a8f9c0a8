"""The service under load: 16 clusters of 64 chips, 16 figures of each every second, 50 requests/s.

Latency counts from when a request was due. Also: how long a cluster takes to become ready, how long
a job of 8 ranks takes from its submission to the moment all its ranks are ready, and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import results

from meshwright.base.errors import MeshwrightError
from meshwright.control.client import Client

_PROGRAM = Path(sys.executable).with_name("meshwright")
_LIMIT_S = 120.0
_SIM_JOB: dict[str, Any] = {
    "job": {"name": "load", "steps": 200},
    "model": {"preset": "llama3-8b"},
    "data": {"source": "python-stdlib", "seq_len": 4096, "global_batch": 64},
    "layout": {"dp_shard": 8, "tp": 4, "micro_batch": 1, "precision": "bf16"},
    "cluster": {"ref": "local:32", "spares": 1},
    "resilience": {"redundancy": "shadow"},
}
_LOCAL_JOB: dict[str, Any] = {
    "job": {"name": "small", "steps": 3, "eval_every": 3, "eval_sequences": 4},
    "model": {"preset": "tiny"},
    "data": {"source": "", "seq_len": 64, "global_batch": 8},
    "layout": {"dp_replicate": 2, "tp": 2, "pp": 2, "micro_batch": 2},
    "cluster": {"ref": "local:8"},
}


@contextmanager
def served(home: Path) -> Iterator[tuple[Client, int]]:
    """A client of a real service, and the number of its process."""
    command = [str(_PROGRAM), "up", "--home", str(home), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    said = ""
    while not said.rstrip().endswith("}"):
        said += process.stdout.readline()
    try:
        with Client(json.loads(said)["url"]) as client:
            _await(lambda: _leads(client))
            yield client, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_LIMIT_S)
        process.stdout.close()


def _leads(client: Client) -> bool:
    try:
        return bool(client.get("/service")["leads"])
    except MeshwrightError:
        return False


def _await(look: Any) -> Any:
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.05)
    raise SystemExit("nothing came of it in time")


def make(client: Client, name: str, **spec: Any) -> float:
    """Seconds from asking for a cluster until it is ready."""
    begun = time.perf_counter()
    taken = client.send("POST", "/clusters", {"name": name, **spec})
    operation = f"/operations/{taken['operation']['id']}"
    _await(lambda: client.get(operation)["status"] == "SUCCEEDED")
    return time.perf_counter() - begun


def submit(client: Client, cluster: str, job: dict[str, Any]) -> float:
    """Seconds from submission until all ranks were ready, by the service's own clock."""
    name = client.send("POST", "/jobs", {"cluster": cluster, "job": job})["id"]
    _await(lambda: client.get(f"/jobs/{name}")["status"] == "SUCCEEDED")
    found = client.get(f"/jobs/{name}")
    return _seconds(found["running_at"]) - _seconds(found["created_at"])


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def halves(pid: int) -> list[int]:
    """The two processes of a service: the one that acts, and the one that answers."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    mine = Path(f"/proc/{pid}/cmdline").read_bytes()
    same = [int(one) for one in children if Path(f"/proc/{one}/cmdline").read_bytes() == mine]
    return [pid, *same]


def memory_mb(pid: int) -> float:
    """Of both halves, in 1e6 bytes, what they share counted once."""
    found = [Path(f"/proc/{one}/smaps_rollup").read_text() for one in halves(pid)]
    sizes = [text.partition("\nPss:")[2].split()[0] for text in found]
    return sum(map(int, sizes)) * 1024 / 1e6


def cpu_s(pid: int) -> float:
    """Of both halves so far."""
    found = [Path(f"/proc/{one}/stat").read_text().rpartition(")")[2] for one in halves(pid)]
    ticks = sum(int(fields.split()[place]) for fields in found for place in (11, 12))
    return ticks / os.sysconf("SC_CLK_TCK")


def load(
    client: Client, pid: int, clusters: Sequence[str], rate: float, seconds: float
) -> dict[str, Any]:
    """Latencies by route, in seconds, and what the service took meanwhile."""
    command = [sys.executable, str(Path(__file__).with_name("service_load.py")), client.url]
    command += [json.dumps(_SIM_JOB), *clusters, "--rate", str(rate), "--seconds", str(seconds)]
    begun, used, held = time.perf_counter(), cpu_s(pid), [memory_mb(pid)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found: dict[tuple[str, bool], list[float]] = defaultdict(list)
    failed = 0
    for line in process.stdout:
        one = json.loads(line)
        found[one["route"], one["write"]].append(one["s"])
        # A stop may come after the end of its job: that is an answer, and no failure.
        late = one["route"] == "stop" and one["status"] == 409
        failed += not (200 <= one["status"] < 300 or late)
        if time.perf_counter() - begun > seconds * len(held) / 10:
            held.append(memory_mb(pid))
    if process.wait(_LIMIT_S):
        raise SystemExit("the load generator failed")
    held.append(memory_mb(pid))
    wall = time.perf_counter() - begun
    return {"took": found, "failed": failed, "cpu": (cpu_s(pid) - used) / wall, "held": held}


def percentiles(values: Sequence[float]) -> list[str]:
    """p50, p95, p99 and the largest, in ms."""
    return [f"{1e3 * float(np.percentile(values, p)):.1f}" for p in (50, 95, 99, 100)]


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=16)
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=12, help="on this machine, one by one")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="service-"))
    with served(folder / "sim") as (client, pid):
        names = [f"c{number}" for number in range(asked.clusters)]
        ready = [make(client, name) for name in names]
        seen = load(client, pid, names, asked.rate, asked.seconds)
    with served(folder / "local") as (client, _):
        local = [make(client, f"l{n}", engine="local", instance="local", nodes=1) for n in range(3)]
        started = _local_jobs(client, folder, asked.jobs)
    text = _section(asked, ready, seen, local, started)
    print(text)
    if asked.write:
        results.write(text)


def _local_jobs(client: Client, folder: Path, count: int) -> list[float]:
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(20):
        lines = (f"def f_{number}_{line}(x):\n    return x + {line}\n\n" for line in range(90))
        (corpus / f"m{number}.py").write_text("".join(lines))
    job = {**_LOCAL_JOB, "data": {**_LOCAL_JOB["data"], "source": str(corpus)}}
    submit(client, "l0", job)  # prepares the data
    found = []
    for _ in range(count):
        time.sleep(6.0)  # the next conductor warms up, as it would between jobs of people
        found.append(submit(client, "l0", job))
    return found


def _section(
    asked: argparse.Namespace,
    ready: list[float],
    seen: dict[str, Any],
    local: list[float],
    started: list[float],
) -> str:
    took: dict[tuple[str, bool], list[float]] = seen["took"]
    rows = []
    for write, name in ((False, "reads"), (True, "writes")):
        every = [value for (_, kind), values in took.items() if kind is write for value in values]
        rows.append([f"all {name}", str(len(every)), *percentiles(every)])
        for (route, kind), values in sorted(took.items()):
            if kind is write:
                rows.append([f"- {route}", str(len(values)), *percentiles(values)])
    table = results.table(["ms from when it was due", "n", "p50", "p95", "p99", "most"], rows)
    held = seen["held"]
    p50, p95 = (float(np.percentile(started, p)) for p in (50, 95))
    lines = [
        table,
        "",
        f"Failed: {seen['failed']}. The service used {seen['cpu']:.2f} cores; it held "
        f"{held[0]:.0f} MB at first, {held[len(held) // 2]:.0f} in the middle, {held[-1]:.0f} at "
        "the end.",
        f"A simulated cluster of 64 chips was ready after {np.median(ready):.2f} s (at most "
        f"{max(ready):.2f}), one of 8 processes after {np.median(local):.1f} s.",
        f"From submission to all 8 ranks ready on this machine: p50 {p50:.2f} s, p95 {p95:.2f} s "
        f"({len(started)} jobs).",
    ]
    facts = {
        "command": results.command(),
        "processes that wanted a core": results.busy(),
        "load": f"{asked.clusters} clusters x 64 chips x 16 figures a second, "
        f"{asked.rate:g} requests/s for {asked.seconds:g} s",
    }
    return results.section("The service under load", facts, "\n".join(lines))


if __name__ == "__main__":
    main()
