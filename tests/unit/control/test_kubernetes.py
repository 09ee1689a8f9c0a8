"""Engine kubernetes against a server that stores objects, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import ConfigError, RunError
from meshwright.control.engines.attempt_folder import LEAD, Folder
from meshwright.control.engines.engine import ClusterOrder, RunOrder
from meshwright.control.engines.kubernetes import KubernetesEngine
from meshwright.control.engines.kubernetes_decide import Seen, judge
from meshwright.control.engines.slurm_decide import End
from meshwright.control.spec import ClusterSpec
from meshwright.control.words import NodeAction, NodeStatus, RunState

GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "kubernetes.json"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
JOB = """\
[job]
steps = 4
[model]
preset = "tiny"
[data]
seq_len = 8
global_batch = 8
[layout]
dp_replicate = 4
[cluster]
ref = "local:4"
spares = 2
[resilience]
redundancy = "{redundancy}"
"""


@dataclass
class Kube:
    """The server, and the cluster that is on it."""

    url: str
    process: subprocess.Popen[bytes]
    engine: KubernetesEngine
    cluster: ClusterOrder
    root: Path

    def get(self, path: str) -> dict[str, Any] | None:
        answer = httpx.get(self.url + path)
        return None if answer.status_code == 404 else answer.json()

    def put(self, path: str, document: dict[str, Any]) -> None:
        httpx.put(self.url + path, json=document).raise_for_status()

    def node(self, number: int, ready: str = "True", **spec: Any) -> None:
        condition = {"type": "Ready", "status": ready, "message": "kubelet said so"}
        self.put(
            f"/api/v1/nodes/k{number}",
            {
                "metadata": {"name": f"k{number}", "labels": {"meshwright.dev/cluster": "kube"}},
                "spec": spec,
                "status": {"conditions": [condition], "allocatable": {"nvidia.com/gpu": "2"}},
            },
        )

    def order(self, redundancy: str = "auto", nodes: tuple[int, ...] = (0, 1, 2)) -> RunOrder:
        job_file = self.root / "job.toml"
        job_file.write_text(JOB.format(redundancy=redundancy))
        chips = tuple((nodes[i * len(nodes) // 6], i % 2) for i in range(6))
        return RunOrder("J1", 1, self.root / "run", job_file, chips, 4, 1000.0)


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[Kube]:
    port_file = tmp_path / "port"
    server = Path(__file__).with_name("kube_server.py")
    with subprocess.Popen([sys.executable, str(server), str(port_file)]) as process:
        try:
            deadline_s = time.monotonic() + 60
            while not port_file.exists():
                assert time.monotonic() < deadline_s, "the server does not begin"
                time.sleep(0.02)
            url = f"http://127.0.0.1:{port_file.read_text()}"
            spec = ClusterSpec(
                name="kube", engine="kubernetes", instance="p5", nodes=3, chips_per_node=2
            )
            cluster = ClusterOrder("c1", spec, 2, tmp_path / "shared", 0.0)
            engine = KubernetesEngine(url, claim="shared", mount="/shared")
            made = Kube(url, process, engine, cluster, tmp_path)
            for number in range(3):
                made.node(number)
            yield made
            engine.close()
        finally:
            process.kill()


def test_a_run_is_one_jobset_however_often_it_is_started(kube: Kube) -> None:
    order = kube.order()
    assert kube.engine.look(kube.cluster, order).state is RunState.ABSENT
    first = kube.engine.start(kube.cluster, order)
    before = kube.get(JOBSETS)
    assert kube.engine.start(kube.cluster, order) == first == {"jobset": "mw-j1-1"}
    assert kube.get(JOBSETS) == before
    found = kube.get(f"{JOBSETS}/mw-j1-1")
    text = json.dumps(found, indent=2).replace(str(kube.root), "ROOT") + "\n"
    if os.environ.get("REGENERATE_GOLDEN") == "1":
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text
    assert kube.engine.look(kube.cluster, order).state is RunState.STARTING


def test_what_a_run_goes_through(kube: Kube) -> None:
    order = kube.order()
    kube.engine.start(kube.cluster, order)
    folder = Folder.of(kube.cluster.home, "J1")
    lock = folder.lock(LEAD, wait=False)
    folder.mark(LEAD, 1, "begun")
    order.run_dir.mkdir()
    events = order.run_dir / "events.jsonl"
    _say(events, {"kind": "run_started", "ts": 1001.0, "world": 2})
    assert kube.engine.look(kube.cluster, order).state is RunState.STARTING
    for rank in range(2):
        _say(events, {"kind": "rank_ready", "ts": 1002.0, "rank": rank})
    assert kube.engine.look(kube.cluster, order).state is RunState.RUNNING
    assert lock is not None
    os.close(lock)  # its pod is gone: another comes
    report = kube.engine.look(kube.cluster, order)
    assert (report.state, report.message) == (RunState.RUNNING, "nobody conducts it")
    kube.engine.start(kube.cluster, second := replace(order, attempt=2, started_s=2000.0))
    assert kube.engine.look(kube.cluster, order).state is RunState.LOST
    assert kube.get(f"{JOBSETS}/mw-j1-1") is None
    assert kube.engine.look(kube.cluster, second).state is RunState.STARTING
    folder.mark(LEAD, 2, "begun")
    folder.mark(LEAD, 2, "ended", code=0)
    _say(events, {"kind": "run_started", "ts": 2001.0, "world": 2})
    _say(events, {"kind": "run_finished", "ts": 2002.0})
    assert kube.engine.look(kube.cluster, second).state is RunState.FINISHED
    kube.engine.destroy(kube.cluster)
    assert kube.get(JOBSETS) == {"items": []}


def test_a_run_that_is_stopped_before_it_begins(kube: Kube) -> None:
    order = kube.order()
    kube.engine.start(kube.cluster, order)
    kube.engine.stop(kube.cluster, order, hard=False)
    assert kube.engine.look(kube.cluster, order).state is RunState.STOPPED


def test_a_server_that_does_not_answer_is_no_evidence(kube: Kube) -> None:
    """Case 8: nodes and runs are unknown, and nothing is taken for failed."""
    order = kube.order()
    kube.engine.start(kube.cluster, order)
    kube.process.send_signal(signal.SIGSTOP)
    nodes = kube.engine.observe(kube.cluster, 5.0).nodes
    assert {node.status for node in nodes} == {NodeStatus.UNKNOWN}
    assert kube.engine.look(kube.cluster, order).state is RunState.UNKNOWN
    with pytest.raises(RunError, match="does not answer"):
        kube.engine.start(kube.cluster, order)
    kube.process.send_signal(signal.SIGCONT)
    deadline_s = time.monotonic() + 60
    while (state := kube.engine.look(kube.cluster, order).state) is RunState.UNKNOWN:
        assert time.monotonic() < deadline_s
    assert state is RunState.STARTING


def test_nodes_as_the_server_sees_them(kube: Kube) -> None:
    kube.node(1, ready="Unknown")
    kube.node(2, ready="False")
    statuses = [node.status for node in kube.engine.observe(kube.cluster, 5.0).nodes]
    assert statuses == [NodeStatus.RUNNING, NodeStatus.UNKNOWN, NodeStatus.FAILED]


def test_nobody_uncordons_what_somebody_else_has_cordoned(kube: Kube) -> None:
    """Case 14."""

    def act(action: NodeAction) -> NodeStatus:
        list(kube.engine.act(kube.cluster, 0, action))
        return kube.engine.observe(kube.cluster, 5.0).nodes[0].status

    assert act(NodeAction.DRAIN) is NodeStatus.DRAINED
    assert act(NodeAction.RESUME) is NodeStatus.RUNNING
    kube.node(0, unschedulable=True)
    with pytest.raises(ConfigError, match="kubectl uncordon k0"):
        act(NodeAction.RESUME)
    assert act(NodeAction.DRAIN) is NodeStatus.DRAINED
    with pytest.raises(ConfigError, match="kubectl uncordon k0"):
        act(NodeAction.RESUME)
    with pytest.raises(ConfigError, match="Kubernetes cannot"):
        act(NodeAction.REBOOT)


def test_a_cluster_is_deployed_or_says_why_not(kube: Kube) -> None:
    with pytest.raises(RunError, match="has no volume claim shared"):
        list(kube.engine.deploy(kube.cluster))
    kube.put("/api/v1/namespaces/default/persistentvolumeclaims/shared", {"metadata": {}})
    assert list(kube.engine.deploy(kube.cluster))[-1].phase == "ready"
    more = replace(kube.cluster, spec=kube.cluster.spec.model_copy(update={"nodes": 4}))
    with pytest.raises(ConfigError, match=r"nodes = 4: 3 nodes have the label"):
        list(kube.engine.deploy(more))
    with pytest.raises(ConfigError, match=r"resilience.redundancy = 'none': a job on 3 nodes"):
        kube.engine.start(kube.cluster, kube.order(redundancy="none"))


@given(
    *[st.booleans()] * 7,
    st.sampled_from(End),
    st.sampled_from([None, {}, {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}]),
)
@settings(deadline=None)
def test_a_run_whose_leader_lives_has_not_ended(
    answered: bool,
    survives: bool,
    begun: bool,
    held: bool,
    ended: bool,
    stop: bool,
    ready: bool,
    end: End,
    jobset: dict[str, Any] | None,
) -> None:
    """And without an answer nothing is lost that might live."""
    seen = Seen(answered, jobset, survives, begun, held, ended, stop, ready, end, "")
    state = judge(seen).state
    assert not (held and state.ended)
    assert not (not answered and not ended and state.ended)


def _say(events: Path, event: dict[str, Any]) -> None:
    with events.open("a") as file:
        file.write(json.dumps(event) + "\n")
