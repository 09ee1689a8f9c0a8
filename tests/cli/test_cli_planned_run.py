"""Runs and the planner: what was predicted is kept beside what came, and teaches the next run."""

from __future__ import annotations

import json
from pathlib import Path

from cli_runs import Cli, write_job

from meshwright.base.config import read_toml


def test_auto_trains_and_learns(cli: Cli, corpus: Path, tmp_path: Path) -> None:
    cli.extra_env["MESHWRIGHT_CONFIG"] = str(tmp_path / "config")
    job = write_job(tmp_path / "job.toml", corpus, steps=10)
    head, _, rest = job.read_text().partition("[layout]")
    job.write_text('layout = "auto"\n\n' + head + rest[rest.index("[cluster]") :])
    cli.ok("train", job, "--run-dir", "one")
    cli.ok("train", job, "--run-dir", "two")

    def predicted(run: str) -> float:
        plan = json.loads((cli.cwd / run / "plan.json").read_text())
        lines = (cli.cwd / run / "metrics.jsonl").read_text().splitlines()
        told = {json.loads(line)["predicted_step_time_s"] for line in lines}
        assert told == {plan["prediction"]["step_time_s"]}
        assert set(plan["placement_seconds"]) <= {"tp", "cp", "pp", "dp", "fsdp", "dp_replicate"}
        return float(plan["prediction"]["step_time_s"])

    assert predicted("one") != predicted("two")
    layout = read_toml(cli.cwd / "one" / "job.toml")["layout"]
    sizes = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    world = 1
    for axis in sizes:
        world *= layout[axis]
    assert world == 8
    kept = read_toml(tmp_path / "config" / "calibration" / "local-8.toml")
    assert [run["steps"] for run in kept["runs"]] == [7, 7]


def test_speed_that_cannot_be_kept_costs_no_run(cli: Cli, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("a file where a folder should be")
    cli.extra_env["MESHWRIGHT_CONFIG"] = str(tmp_path / "config")
    job = write_job(tmp_path / "job.toml", corpus, steps=10)
    assert "speed not kept" in cli.ok("train", job, "--run-dir", "run").stderr
