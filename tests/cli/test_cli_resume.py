"""Stopped or killed and gone on with: the same bits as without."""

from __future__ import annotations

import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cli_runs import (
    ONE_PROCESS,
    STEPS,
    Cli,
    FinishedRun,
    all_end,
    events,
    learning,
    metrics,
    one_error_line,
    snapshot,
    write_job,
)

from meshwright.base.events import Kind
from meshwright.checkpoint.opening import newest


@dataclass(frozen=True)
class StoppedRun:
    """A run that its user stopped, and what its command said."""

    path: Path
    cli: Cli
    said: subprocess.CompletedProcess[str]

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.path, to))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> StoppedRun:
    """Stopped by Ctrl-C after step 4; saves between its periodic checkpoints too."""
    home = tmp_path_factory.mktemp("stopped")
    job_file, run = write_job(home / "job.toml", corpus), home / "a run"
    cli = Cli(home, cache)
    with cli.started("train", job_file, "--run-dir", "a run") as command:
        command.wait_for_step(run, 4)
        command.signal(signal.SIGINT)
        said = command.end()
    return StoppedRun(run, cli, said)


def assert_same_bits(run: Path, reference: Path) -> None:
    assert learning(run) == learning(reference)
    ours, theirs = (newest(path / "checkpoints") for path in (run, reference))
    assert ours.step == theirs.step == STEPS
    assert ours.names == theirs.names
    for name in ours.names:
        assert np.array_equal(ours.read(name), theirs.read(name)), name


def test_ctrl_c_saves_and_says_how_to_go_on(stopped: StoppedRun) -> None:
    assert (stopped.said.returncode, stopped.said.stdout) == (130, "")
    (told,) = events(stopped.path, Kind.RUN_INTERRUPTED)
    step = told["step"]
    assert 4 <= step < STEPS
    assert [row["step"] for row in metrics(stopped.path)] == list(range(1, step + 1))
    assert newest(stopped.path / "checkpoints").step == step
    last_line = stopped.said.stderr.splitlines()[-1]
    assert last_line.startswith(f"stopped at step {step}; go on with: meshwright train ")
    assert "interrupted" in (stopped.path / "report.html").read_text()


def test_the_way_on_can_be_pasted_into_a_shell(stopped: StoppedRun) -> None:
    words = stopped.said.stderr.splitlines()[-1].partition("go on with: meshwright ")[2]
    said = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {words}"], capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == ["train", "a run", "--resume"]


def test_resumed_after_ctrl_c_has_the_same_bits(
    stopped: StoppedRun, finished: FinishedRun, tmp_path: Path
) -> None:
    run = stopped.copy(tmp_path / "run")
    stopped.cli.ok("train", run, "--resume")
    assert_same_bits(run, finished.path)
    starts = events(run, Kind.RUN_STARTED)
    (interrupted,) = events(run, Kind.RUN_INTERRUPTED)
    assert [start["resumed_from"] for start in starts] == [None, interrupted["step"]]
    assert [start["incarnation"] for start in starts] == [1, 2]
    assert (run / "model" / "config.json").is_file()


def test_resumed_under_another_layout_learns_the_same(
    stopped: StoppedRun, finished: FinishedRun, tmp_path: Path
) -> None:
    run = stopped.copy(tmp_path / "run")
    stopped.cli.ok("train", run, "--resume", *ONE_PROCESS)
    ours = [float(row["loss"]) for row in metrics(run)]
    assert ours == pytest.approx([float(row["loss"]) for row in metrics(finished.path)], rel=1e-4)
    assert [start["layout"] for start in events(run, Kind.RUN_STARTED)][-1] == "one process"


def test_resumed_sharded_learns_the_same(
    stopped: StoppedRun, finished: FinishedRun, tmp_path: Path
) -> None:
    run = stopped.copy(tmp_path / "run")
    shards = ("-o", "layout.dp_shard=2", "-o", "cluster.ref=local:2")
    stopped.cli.ok("train", run, "--resume", *ONE_PROCESS, *shards)
    ours = [float(row["loss"]) for row in metrics(run)]
    assert ours == pytest.approx([float(row["loss"]) for row in metrics(finished.path)], rel=1e-4)


def test_killed_at_once_and_resumed_has_the_same_bits(
    cli: Cli, job_file: Path, finished: FinishedRun
) -> None:
    run = cli.cwd / "run"
    with cli.started("train", job_file, "--run-dir", run) as command:
        command.wait_for_step(run, 5)
        left = [command.launcher(), *command.workers()]
        assert len(left) == 9
        command.signal(signal.SIGKILL)
        assert command.end().returncode == -signal.SIGKILL
        assert all_end(left)
    saved = newest(run / "checkpoints").step
    cli.ok("train", run, "--resume")
    assert_same_bits(run, finished.path)
    assert events(run, Kind.RUN_STARTED)[-1]["resumed_from"] == saved


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (("model.hidden=64",), "model.hidden"),
        (("model.layers=4",), "model.layers"),
        (("job.seed=1",), "job.seed"),
        (("data.global_batch=16",), "data.global_batch"),
        (("data.seq_len=16",), "data.seq_len"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_would_make_it_another_run_is_refused(
    stopped: StoppedRun, tmp_path: Path, change: tuple[str, ...], names: str
) -> None:
    """Otherwise samples would be seen twice or never, or the weights not fit."""
    run = stopped.copy(tmp_path / "run")
    before = snapshot(run)
    args = [arg for key in change for arg in ("-o", key)]
    said = stopped.cli.run("train", run, "--resume", *args)
    assert names in one_error_line(said, 2)
    assert snapshot(run) == before


def test_nothing_to_resume_is_refused(
    stopped: StoppedRun, finished: FinishedRun, tmp_path: Path
) -> None:
    bare = stopped.copy(tmp_path / "bare")
    shutil.rmtree(bare / "checkpoints")
    (bare / "checkpoints").mkdir()
    other = tmp_path / "other"
    other.mkdir()
    for run, reason in ((finished.path, "job.steps"), (bare, "checkpoint"), (other, "not a run")):
        before = snapshot(run)
        assert reason in one_error_line(stopped.cli.run("train", run, "--resume"), 2)
        assert snapshot(run) == before
