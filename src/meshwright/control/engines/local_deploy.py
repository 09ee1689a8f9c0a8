"""What a local cluster does to be ready: its folder, and the self-test of this machine."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from meshwright.base.errors import RunError
from meshwright.conduct.protocol import LineBuffer
from meshwright.control.engines.engine import ClusterOrder, DeployStep

_SELF_TEST = (sys.executable, "-P", "-m", "meshwright.train.selftest")
_PHASES = (
    "wire",
    "mount",
    "initialise",
    "compute",
    "memory",
    "bandwidth",
    "fp8",
    "drill",
)  # as they come
_LIMIT_S = 300.0
# Processes are forked from this one: threads would deadlock them.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def deploy(cluster: ClusterOrder) -> Iterator[DeployStep]:
    """Make the folder and measure. Raises RunError with one line if a part fails."""
    cluster.home.mkdir(parents=True, exist_ok=True)
    nodes = cluster.node_count
    line = f"{nodes} nodes of {cluster.chips_per_node} processes of this machine"
    yield DeployStep("initialise", line, 0.0, {"chips": float(cluster.chips)})
    yield from self_test(cluster, cluster.chips)
    yield DeployStep("ready", f"cluster {cluster.spec.name} is ready", 1.0)


def self_test(cluster: ClusterOrder, chips: int) -> Iterator[DeployStep]:
    """The self-test, by a process of its own that ends with this iterator."""
    command = [*_SELF_TEST, "--processes", str(chips), "--home", str(cluster.home)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, **_ONE_THREAD},
        start_new_session=True,
    )
    done = 0
    try:
        for said in _lines(process):
            if said["phase"] == "failed":
                raise RunError(f"self-test of {cluster.spec.name}: {said['line']}")
            done += 1
            yield DeployStep(
                said["phase"], said["line"], done / (1 + len(_PHASES)), said["figures"]
            )
        if process.wait(timeout=_LIMIT_S) or done < len(_PHASES):
            raise RunError(
                f"self-test of {cluster.spec.name} ended after {done} of {len(_PHASES)} parts; "
                "see the log of the service"
            )
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _lines(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """What it says. Raises RunError after `_LIMIT_S`."""
    assert process.stdout is not None
    deadline_s, lines = time.monotonic() + _LIMIT_S, LineBuffer()
    pipe = process.stdout.fileno()
    while True:
        if not select.select([pipe], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            raise RunError(f"the self-test has not ended after {_LIMIT_S:g} s")
        if not (data := os.read(pipe, 1 << 16)):
            return
        for line in lines.feed(data):
            yield json.loads(line)
