"""A rank that dies, and a second command that wants the same directory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import Cli, Running, all_end, events, metrics, one_error_line, snapshot

from meshwright.base.events import Kind

GUARD_S = 10.0  # issue 2 asks for 2 s; the rest is for a busy machine


@pytest.fixture
def endless(cli: Cli, job_file: Path) -> tuple[str, ...]:
    return ("train", str(job_file), "-o", "job.steps=100000", "--run-dir", str(cli.cwd / "run"))


def test_a_dead_rank_ends_the_run_at_once(
    cli: Cli, endless: tuple[str, ...], record_property: Callable[[str, object], None]
) -> None:
    run = cli.cwd / "run"
    with cli.started(*endless) as command:
        command.wait_for_step(run, 3)
        everyone = [command.launcher(), *command.workers()]
        victim = everyone[1 + 5]
        os.kill(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        said = command.end()
        took_s = time.monotonic() - killed_s
    record_property("kill_to_exit_s", took_s)
    assert took_s < GUARD_S
    assert all_end(everyone)
    *_, last_line = said.stderr.splitlines()
    assert (said.returncode, said.stdout) == (1, "")
    assert [line for line in said.stderr.splitlines() if "error" in line] == [last_line]
    (lost,) = events(run, Kind.RANK_LOST)
    assert (lost["rank"], lost["pid"], lost["signal"]) == (5, victim, "SIGKILL")
    assert lost["step"] >= 3
    for word in ("rank 5 ", f"step {lost['step']} ", "SIGKILL", str(run / "logs" / "rank-5.log")):
        assert word in last_line
    assert "failed" in (run / "report.html").read_text()
    assert [row["step"] for row in metrics(run)] == list(range(1, len(metrics(run)) + 1))


def test_a_run_directory_has_one_master(cli: Cli, endless: tuple[str, ...]) -> None:
    run = cli.cwd / "run"

    def refused(*args: str | Path) -> None:
        line = one_error_line(cli.run(*args), 2)
        assert str(run) in line
        assert f"process {command.process.pid}" in line

    with cli.started(*endless) as command:
        command.wait_for_step(run, 1)
        refused(*endless)
        refused("train", run, "--resume")
        assert '"status": "running"' in cli.ok("report", run, "--json").stdout
        stop_twice(command)


def stop_twice(command: Running) -> None:
    """A user without patience: the second Ctrl-C kills."""
    everyone = [command.launcher(), *command.workers()]
    command.signal(signal.SIGINT)
    command.signal(signal.SIGINT)
    assert command.end().returncode == 130
    assert all_end(everyone)


def test_ctrl_c_before_the_first_step(cli: Cli, endless: tuple[str, ...]) -> None:
    run = cli.cwd / "run"
    with cli.started(*endless) as command:
        command.wait_for(lambda: bool(events(run, Kind.RUN_STARTED)))
        command.signal(signal.SIGINT)
        said = command.end()
    assert (said.returncode, said.stdout) == (130, "")
    assert "Traceback" not in said.stderr
    assert "stopped at step" in said.stderr.splitlines()[-1]
    before = snapshot(run)
    if not metrics(run):
        assert "checkpoint" in one_error_line(cli.run("train", run, "--resume"), 2)
        assert snapshot(run) == before


def test_ctrl_c_while_data_is_prepared(
    cli: Cli, tmp_path: Path, endless: tuple[str, ...], corpus: Path
) -> None:
    large = tmp_path / "large.txt"
    text = "".join(path.read_text() for path in sorted(corpus.iterdir()))
    large.write_text("\n".join(f"{n} {text}" for n in range(300)))
    cache = tmp_path / "cache"
    own = Cli(cli.cwd, cache)
    with own.started(*endless, "-o", f"data.source={large}") as command:
        command.wait_for(lambda: any(cache.glob("data/.building-*/*")))
        command.signal(signal.SIGINT)
        said = command.end()
    assert (said.returncode, said.stdout) == (130, "")
    assert "Traceback" not in said.stderr
    assert list((cache / "data").iterdir()) == []
    assert list(cli.cwd.iterdir()) == []
