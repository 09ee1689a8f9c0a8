"""A job trained from the command line: what it says, leaves behind, and can be used for."""

from __future__ import annotations

import json

import pytest
from cli_runs import ONE_PROCESS, STEPS, Cli, FinishedRun, events, lines, metrics

from meshwright.base.events import Kind, Metrics
from meshwright.checkpoint.store import Store
from meshwright.plan.job import load_job


def test_run_directory_is_complete(finished: FinishedRun) -> None:
    run = finished.path
    names = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    assert names == {
        *("job.toml", "plan.json", "data.json", "events.jsonl", "metrics.jsonl"),
        "attempt",
        *("logs", "checkpoints", "model", "report.html"),
    }
    assert {path.name for path in (run / "logs").iterdir()} == {f"rank-{n}.log" for n in range(8)}
    kept = [commit.step for commit in Store.open(run / "checkpoints").commits()]
    assert kept[-2:] == [STEPS - 2, STEPS]
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


def test_runs_made_at_once_get_their_own_names(cli: Cli, finished: FinishedRun) -> None:
    args = ("-o", "job.steps=1", "-o", "data.global_batch=2", "-o", "job.name=odd._-Name")
    train = ("train", finished.job_file, *ONE_PROCESS, *args)
    with cli.started(*train) as first, cli.started(*train) as second:
        both = [first.end(), second.end()]
    assert [(said.returncode, said.stdout) for said in both] == [(0, ""), (0, "")]
    ways_on = {said.stderr.splitlines()[-1] for said in both}
    command = 'try:    meshwright generate runs/odd._-Name-{} --prompt "def "'
    assert ways_on == {command.format(1), command.format(2)}
    assert all(len(metrics(cli.cwd / f"runs/odd._-Name-{number}")) == 1 for number in (1, 2))


def test_generate_goes_on_from_the_prompt(finished: FinishedRun, cli: Cli) -> None:
    def text(*args: str) -> str:
        prompt = ("--prompt", "def ", "--max-tokens", "12")
        said: str = cli.ok("generate", finished.path, *prompt, *args).stdout
        return said

    drawn = text("--seed", "3")
    assert drawn.startswith("def ")
    document = json.loads(text("--seed", "3", "--json"))
    assert document["prompt"] + document["text"] + "\n" == drawn
    likeliest = text("--temperature", "0", "--seed", "3")
    assert likeliest.startswith("def ")
    assert likeliest != drawn
    assert likeliest == text("--temperature", "0", "--seed", "4")


def test_bf16_on_every_axis_starts_where_fp32_does(cli: Cli, finished: FinishedRun) -> None:
    """With one micro-batch, fewer than there are stages."""
    layout = ("layout.dp_replicate=1", "layout.dp_shard=2", "layout.micro_batch=4")
    changes = (*layout, "layout.precision=bf16", "job.steps=2", "job.eval_sequences=5000")
    overrides = [arg for change in changes for arg in ("-o", change)]
    cli.ok("train", finished.job_file, *overrides, "--run-dir", "out")
    reference, found = metrics(finished.path)[0], metrics(cli.cwd / "out")[0]
    assert float(found["loss"]) == pytest.approx(float(reference["loss"]), rel=2e-3)
