"""The recipe of the README, shortened: it learns more than how often each token occurs."""

from __future__ import annotations

from pathlib import Path

from cli_runs import Cli, events

from meshwright.base.events import Kind

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
SHORT = {
    "layout.tp": 1,
    "layout.pp": 1,
    "cluster.ref": "local:2",
    "job.steps": 60,
    "job.eval_every": 60,
    "data.seq_len": 128,
    "data.global_batch": 8,
    "optimizer.warmup_steps": 5,
}


def test_short_quickstart_beats_the_unigram_model(cli: Cli) -> None:
    overrides = [arg for key, value in SHORT.items() for arg in ("-o", f"{key}={value}")]
    cli.ok("train", RECIPE, *overrides, "--run-dir", "run")
    (evaluated,) = events(cli.cwd / "run", Kind.EVALUATED)
    assert float(evaluated["loss"]) < float(evaluated["unigram_loss"]) - 0.1
    assert float(evaluated["bigram_loss"]) < float(evaluated["unigram_loss"])
