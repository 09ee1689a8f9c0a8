"""`meshwright check` from the command line. What it can tell apart is tested in tests/parity."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cli_runs import Cli, snapshot

HERE = Path(__file__).parent


def test_an_honest_layout_is_equal(cli: Cli, job_file: Path) -> None:
    before = snapshot(cli.cwd)
    said = cli.ok("check", job_file, "--steps", "3", "--json")
    document = json.loads(said.stdout)
    assert document["equal"] is True
    assert document["loss_rel"] <= 1e-5
    assert document["grad_norm_rel"] <= 1e-5
    assert len(document["steps"]) == 3
    assert {"name", "rel", "norm_ratio"} <= document["worst"][0].keys()
    assert snapshot(cli.cwd) == before


def test_a_layout_that_counts_twice_is_not(cli: Cli, job_file: Path) -> None:
    program = (sys.executable, str(HERE / "cli_faulty_check.py"))
    faulty = Cli(cli.cwd, cli.cache, program, {"PYTHONPATH": str(HERE)})
    said = faulty.run("check", job_file, "--steps", "1")
    assert said.returncode == 1, said.stderr
    assert "Traceback" not in said.stderr
    assert said.stdout.startswith("NOT equal: ")
    assert "layers.0." in said.stdout
