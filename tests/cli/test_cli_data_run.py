"""Runs that read what `meshwright data build` made: mixed, packed, killed, gone on with."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from cli_runs import Cli, learning, metrics, one_error_line

from meshwright.checkpoint.opening import newest
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.store import Store

STEPS = 16
JOB = f"""\
[job]
name = "mixed"
steps = {STEPS}
eval_every = 8
eval_sequences = 8

[model]
family = "llama"
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn_hidden = 64
vocab = 257

[data]
source = [{{path = "code", weight = 3}}, {{path = "prose", weight = 1}}]
stages = [{{step = 8, weights = [1, 1]}}]
packing = "best-fit"
seq_len = 64
global_batch = 8

[layout]
dp_replicate = 2

[cluster]
ref = "local:2"

[checkpoint]
every = 4
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Two builds and a job file that mixes them."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "mixed.toml").write_text(JOB)
    rows = [{"text": f"Once upon a time there were {n} of them. " * (1 + n % 3)} for n in range(99)]
    (folder / "prose.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build = Cli(folder, folder / "cache")
    build.ok("data", "build", "code", corpus, "--held-out", "0.2", "--processes", "1")
    build.ok("data", "build", "prose", "prose.jsonl", "--held-out", "0.2")
    return folder


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """A run that nothing disturbed."""
    Cli(home, home / "cache").ok("train", "mixed.toml", "--run-dir", "whole")
    return home / "whole"


def test_packed_documents_count_fewer_targets_and_what_is_read_is_kept(whole: Path) -> None:
    tokens = [row["tokens"] for row in metrics(whole)]
    assert len(tokens) == STEPS
    assert max(tokens) <= 8 * 64
    assert STEPS * 8 * 64 * 0.9 < sum(tokens) < STEPS * 8 * 64
    meta = newest(whole / "checkpoints").meta
    assert meta["data"]["sample"] == STEPS * 8
    assert (whole / "model" / "tokenizer.json").is_file()


def test_killed_and_gone_on_with_it_learns_the_same(home: Path, whole: Path) -> None:
    cli = Cli(home, home / "cache")
    with cli.started("train", "mixed.toml", "--run-dir", "killed") as command:
        command.wait_for_step(home / "killed", 6)
        command.signal(signal.SIGKILL)
        command.end()
    cli.ok("train", "killed", "--resume")
    assert learning(home / "killed") == learning(whole)


def test_other_data_is_refused_before_anything_starts(home: Path, whole: Path) -> None:
    cli, longer = Cli(home, home / "cache"), ("-o", f"job.steps={2 * STEPS}")
    kept = home / "prose.kept"
    (home / "prose").rename(kept)
    try:
        cli.ok("data", "build", "prose", "prose.jsonl", "--held-out", "0.3")
        said = one_error_line(cli.run("train", whole, "--resume", *longer), 2)
        assert "of source 1 was" in said and "restore the corpus" in said
    finally:
        shutil.rmtree(home / "prose")
        kept.rename(home / "prose")
    other = home / "other"
    shutil.copytree(whole, other)
    _commit_at_sample(other / "checkpoints", 120)
    said = one_error_line(cli.run("train", other, "--resume", *longer), 2)
    assert "data state at sample 120" in said


def _commit_at_sample(root: Path, sample: int) -> None:
    """The newest state once more, as if it had been reached by other data."""
    last, store = newest(root), Store.open(root)
    meta = {**last.meta, "data": {**last.meta["data"], "sample": sample}}
    pieces = {Piece.whole(name, last.shape(name)): last.read(name).ravel() for name in last.names}
    attempt = Attempt(last.step, "other", ranks=1)
    store.write_part(attempt, 0, pieces)
    store.commit(attempt, meta)
