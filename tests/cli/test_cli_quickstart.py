"""The recipe of the README, shortened: it learns more than how often each token occurs."""

from __future__ import annotations

from pathlib import Path

from cli_runs import ONE_PROCESS, Cli, events

from meshwright.base.events import Kind

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
SHORT = {
    "job.steps": 60,
    "job.eval_every": 60,
    "data.seq_len": 128,
    "data.global_batch": 8,
    "optimizer.warmup_steps": 5,
}


def test_short_quickstart_beats_the_unigram_model(cli: Cli) -> None:
    overrides = [arg for key, value in SHORT.items() for arg in ("-o", f"{key}={value}")]
    cli.ok("train", RECIPE, *ONE_PROCESS, *overrides, "--run-dir", "run")
    (evaluated,) = events(cli.cwd / "run", Kind.EVALUATED)
    assert float(evaluated["loss"]) < float(evaluated["unigram_loss"]) - 0.2
    assert float(evaluated["bigram_loss"]) < float(evaluated["unigram_loss"])
