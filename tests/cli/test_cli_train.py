"""A job trained from the command line: what it says, leaves behind, and can be used for."""

from __future__ import annotations

import json
from itertools import chain

import pytest
from cli_runs import ONE_PROCESS, STEPS, Cli, events, lines, metrics
from conftest import FinishedRun

from meshwright.base.events import Kind, Metrics
from meshwright.plan.job import load_job


def test_run_directory_is_complete(finished: FinishedRun) -> None:
    run = finished.path
    names = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    assert names == {
        *("job.toml", "plan.json", "data.json", "events.jsonl", "metrics.jsonl"),
        *("logs", "checkpoints", "model", "report.html"),
    }
    assert {path.name for path in (run / "logs").iterdir()} == {f"rank-{n}.log" for n in range(8)}
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == [f"step-{STEPS - 2:06d}", f"step-{STEPS:06d}"]
    assert load_job(run / "job.toml") == load_job(finished.job_file)


def test_plan_holds_every_rank_and_the_measured_peak(finished: FinishedRun) -> None:
    plan = json.loads((finished.path / "plan.json").read_text())
    assert plan["label"] == "dp2xtp2xpp2"
    assert [rank["rank"] for rank in plan["ranks"]] == list(range(8))
    assert plan["peak_flops_per_chip"] > 0


def test_events_have_no_gaps_and_known_kinds(finished: FinishedRun) -> None:
    told = lines(finished.path / "events.jsonl")
    assert [event["seq"] for event in told] == list(range(1, len(told) + 1))
    kinds = [Kind(event["kind"]) for event in told]
    assert kinds[0] == Kind.RUN_STARTED
    assert kinds[-2:] == [Kind.RUN_FINISHED, Kind.MODEL_EXPORTED]
    assert kinds.count(Kind.RANK_READY) == 8
    assert [event["step"] for event in events(finished.path, Kind.EVALUATED)] == [12, STEPS]
    assert {(event["run"], event["incarnation"]) for event in told} == {("small-1", 1)}


def test_metrics_have_one_line_a_step(finished: FinishedRun) -> None:
    rows = metrics(finished.path)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row.keys() == Metrics.__dataclass_fields__.keys() for row in rows)
    assert all(row["tokens"] == 8 * 32 for row in rows)
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) - 0.5


def test_json_is_one_document_on_stdout(finished: FinishedRun) -> None:
    document = json.loads(finished.said.stdout)
    assert (document["status"], document["step"], document["ranks"]) == ("finished", STEPS, 8)
    shown = finished.said.stderr
    assert f"step {STEPS}/{STEPS}" in shown
    assert "report.html" in shown
    assert "\x1b" not in shown, "colours in a log"


def test_report_is_one_file_that_needs_nothing_else(finished: FinishedRun, cli: Cli) -> None:
    page = (finished.path / "report.html").read_text()
    assert "small-1" in page or "small" in page
    assert not any(word in page for word in ("<script", 'src="http', 'href="http', "@import"))
    said = json.loads(cli.ok("report", finished.path, "--json").stdout)
    assert said == json.loads(finished.said.stdout)


def test_without_json_nothing_but_stderr_and_the_way_on(cli: Cli, finished: FinishedRun) -> None:
    args = ("-o", "job.steps=1", "-o", "data.global_batch=2", "-o", "job.name=odd._-Name")
    first, second = (cli.ok("train", finished.job_file, *ONE_PROCESS, *args) for _ in range(2))
    assert first.stdout == second.stdout == ""
    for number, said in ((1, first), (2, second)):
        assert f'meshwright generate runs/odd._-Name-{number} --prompt "def "' in said.stderr


def test_generate_goes_on_from_the_prompt(finished: FinishedRun, cli: Cli) -> None:
    def text(*args: str) -> str:
        prompt = ("--prompt", "def ", "--max-tokens", "12")
        return cli.ok("generate", finished.path, *prompt, *args).stdout

    drawn = text("--seed", "3")
    assert drawn.startswith("def ")
    assert drawn == text("--seed", "3")
    assert drawn != text("--seed", "4")
    likeliest = text("--temperature", "0")
    assert likeliest.startswith("def ")
    assert likeliest == text("--temperature", "0", "--seed", "4")
    document = json.loads(text("--seed", "3", "--json"))
    assert document["prompt"] + document["text"] + "\n" == drawn


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({"tp": 2, "precision": "bf16"}, 2),
        ({"pp": 2, "precision": "bf16", "micro_batch": 8}, 2),  # fewer micro-batches than stages
        ({"dp_shard": 2, "precision": "bf16"}, 2),
    ],
    ids=lambda value: "-".join(map(str, chain(*value.items()))) if isinstance(value, dict) else "",
)
def test_bf16_and_short_pipelines_train(
    cli: Cli, finished: FinishedRun, layout: dict[str, object], ranks: int
) -> None:
    axes = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1, **layout}
    overrides = [arg for key, value in axes.items() for arg in ("-o", f"layout.{key}={value}")]
    few = ("-o", f"cluster.ref=local:{ranks}", "-o", "job.steps=2", "-o", "job.eval_every=1")
    cli.ok("train", finished.job_file, *overrides, *few, "--run-dir", "out")
    reference, found = metrics(finished.path)[0], metrics(cli.cwd / "out")[0]
    assert float(found["loss"]) == pytest.approx(float(reference["loss"]), rel=5e-3)
