"""`meshwright cluster` and `meshwright job` against a real service, in this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from api_service import Service, job, wait_for

from meshwright.base.config import to_toml
from meshwright.cli.app import run


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Of `--json`."""
        return json.loads(self.out)


Meshwright = Callable[..., Said]


@pytest.fixture
def meshwright(service: Service, monkeypatch: pytest.MonkeyPatch) -> Meshwright:
    monkeypatch.setenv("MESHWRIGHT_URL", service.url)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str | Path) -> Said:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["meshwright", *map(str, words)])
        with redirect_stdout(out), redirect_stderr(err):
            code = run()
        return Said(code, out.getvalue(), err.getvalue())

    return call


def test_a_cluster_from_its_making_to_its_end(meshwright: Meshwright, tmp_path: Path) -> None:
    made = meshwright("cluster", "create", "cli", "--nodes", "1", "--set", "storage.nodes=2")
    assert made.code == 0 and "READY" in made.out and "drill" in made.err
    assert meshwright("cluster", "describe", "cli", "--json").document["spec"]["storage"] == {
        "nodes": 2,
        "capacity_tb": 10.0,
        "bandwidth_gb_s": 2.0,
    }
    assert "cli" in meshwright("cluster", "list").out
    hardware = meshwright("cluster", "hardware", "cli").out
    assert hardware.count("ok") == 17 and "spare" in hardware
    assert meshwright("cluster", "inspect", "cli").code == 0
    grown = meshwright("cluster", "update", "cli", "--nodes", "2", "--json").document
    assert grown["cluster"]["chips"] == 33
    emitted = meshwright("cluster", "emit", "jobset", "cli", "--out", tmp_path / "out", "--json")
    assert (tmp_path / "out" / emitted.document["files"][0]).is_file()
    assert meshwright("cluster", "delete", "cli", "nowhere").code == 1
    assert "cli" not in meshwright("cluster", "list").out


def test_what_is_wrong_is_found_named_and_reported(meshwright: Meshwright) -> None:
    meshwright("cluster", "create", "sick", "--nodes", "2", "--spares", "0")
    fault = meshwright(
        "cluster", "fault", "sick", "chip_slow", "--node", "1", "--chip", "3", "--json"
    )
    fine = meshwright("cluster", "benchmark", "sick", "--json")
    assert fine.code == 1
    assert [bool(node["error"]) for node in fine.document["nodes"]] == [False, True]
    assert "chip 3" in fine.document["nodes"][1]["error"]
    wait_for(lambda: meshwright("cluster", "inspect", "sick").code == 1)
    found = meshwright("cluster", "inspect", "sick", "--json")
    assert found.code == 1
    assert {"where": "chip 1.3", "what": "is DEGRADED"} in found.document["findings"]
    report = meshwright("cluster", "report", "sick", "--json").document
    assert report["healthy_chips"] == 31 and report["faults"][0]["kind"] == "chip_slow"
    assert report["by_node"]["1"] > 0 and "chip_slow" in meshwright("cluster", "report", "sick").out
    assert "slow" in meshwright("cluster", "faults", "sick").out
    assert meshwright("cluster", "clear", "sick", fault.document["id"]).code == 0


def test_a_job_from_its_file_to_its_end(meshwright: Meshwright, tmp_path: Path) -> None:
    meshwright("cluster", "create", "jobs", "--set", "speed=500")
    file = tmp_path / "job.toml"
    file.write_text(to_toml(job(steps=20)))
    done = meshwright("job", "submit", file, "--cluster", "jobs", "--wait", "--json")
    assert done.code == 0 and done.document["status"] == "SUCCEEDED"
    name = done.document["id"]
    assert "20/20" in meshwright("job", "list", "--cluster", "jobs").out
    assert "SUCCEEDED" in meshwright("job", "describe", name).out
    assert meshwright("job", "metrics", name, "--limit", "5", "--json").document[-1]["step"] == 20
    assert "run_started" in meshwright("job", "events", name).out
    assert "holds no chips" in meshwright("job", "explain", name).out
    stopped = meshwright("job", "stop", name)
    assert stopped.code == 2 and "SUCCEEDED already" in stopped.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cluster", "describe", "nowhere"), "cluster nowhere: there is none"),
        (("cluster", "create", "x y"), "name"),
        (("cluster", "create", "x", "--set", "nodes"), "--set = 'nodes'"),
        (("cluster", "create", "x", "--set", "nodse=4"), "nodse"),
        (("cluster", "update", "x"), "say what changes"),
        (("cluster", "emit", "jobsets", "x"), 'did you mean "jobset"'),
        (("job", "describe", "job-0"), "job job-0: there is none"),
        (("cluster", "list", "--url", "http://127.0.0.1:1"), "no service answers there"),
    ],
)
def test_what_cannot_be_is_one_line(
    meshwright: Meshwright, words: tuple[str, ...], said: str
) -> None:
    found = meshwright(*words)
    assert found.code in (1, 2) and not found.out
    assert found.err.startswith("error: ") and found.err.count("\n") == 1
    assert said in found.err
