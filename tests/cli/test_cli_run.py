"""`meshwright run` keeps scripts alive that know nothing of it: real processes, real faults."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Cli, Running, all_end, children, events, lines, one_error_line

from meshwright.base.events import Kind

HERE = Path(__file__).parent
SCRIPT = HERE / "foreign_script.py"
FEW_S = ("--longest-stall-s", "1")

Run = Callable[..., tuple[Any, Path]]


@pytest.fixture
def run(cli: Cli, tmp_path: Path) -> Run:
    """Run a script on `nproc` ranks to its end; what the command said, and the run."""

    def go(*args: str, options: tuple[str, ...] = (), nproc: int = 3, script: Path = SCRIPT) -> Any:
        path = tmp_path / "run"
        program = (sys.executable, str(script), str(work), *args)
        said = cli.run("run", "--nproc", str(nproc), "--run-dir", path, *options, "--", *program)
        return said, path

    work = tmp_path / "work"
    work.mkdir()
    return go


def starts(path: Path) -> list[dict[str, Any]]:
    return events(path, Kind.RUN_STARTED)


def test_a_script_that_nothing_happens_to_runs_once(run: Run) -> None:
    said, path = run("9")
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines() == [f"step {step} of incarnation 0" for step in range(1, 10)]
    kinds = [event["kind"] for event in lines(path / "events.jsonl")]
    assert kinds == [Kind.RUN_STARTED, Kind.RUN_FINISHED]
    assert (path / "logs" / "rank-0.log").read_text() == said.stdout
    assert "finished at step 9; run: " in said.stderr


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSEGV"])
def test_a_rank_that_dies_starts_all_again_from_what_was_saved(run: Run, number: str) -> None:
    said, path = run("20", f"{number}:1:10:1")
    assert said.returncode == 0, said.stderr
    (lost,) = events(path, Kind.RANK_LOST)
    assert (lost["rank"], lost["signal"], lost["step"]) == (1, number, 10)
    assert [event["restarts"] for event in starts(path)] == [0, 1]
    shown = said.stdout.splitlines()
    assert shown[8:10] == ["step 9 of incarnation 0", "step 9 of incarnation 1"]
    assert shown[-1] == "step 20 of incarnation 1"
    assert f"rank 1 died at step 10 by {number}; log: " in said.stderr


def test_a_rank_that_is_stopped_is_killed_and_all_start_again(run: Run) -> None:
    said, path = run("20", "SIGSTOP:2:10:1", options=FEW_S)
    assert said.returncode == 0, said.stderr
    (hang,) = events(path, Kind.HANG)
    assert (hang["rank"], hang["what"]) == (2, "stopped (state T)")
    assert len(starts(path)) == 2


def test_an_endless_loop_is_named_with_the_line_it_is_in(run: Run) -> None:
    """Case 20: one rank is stuck in its evaluation. The others wait and use no CPU time."""
    said, path = run("20", "loop:1:10:1", options=FEW_S)
    assert said.returncode == 0, said.stderr
    (hang,) = events(path, Kind.HANG)
    assert (hang["rank"], hang["step"], len(starts(path))) == (1, 10, 2)
    assert "rank 1 hung at step 10 in spin_in_evaluation, " in said.stderr
    assert f"{SCRIPT}:" in said.stderr


def test_a_script_that_tells_nothing_is_watched_by_what_it_prints(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUTE", "1")
    said, path = run("20", "loop:2:10:1", options=FEW_S)
    assert said.returncode == 0, said.stderr
    (hang,) = events(path, Kind.HANG)
    assert (hang["rank"], hang["step"], len(starts(path))) == (2, None, 2)


def test_the_third_crash_at_the_same_step_ends_the_job(run: Run) -> None:
    """Case 9."""
    said, path = run("20", "raise:1:6:99")
    error = said.stderr.splitlines()[-1]
    assert said.returncode == 1
    assert error.startswith("error: 3 failures in a row without progress; the last: rank 1 failed")
    assert "at step 6 with exit code 1: ValueError: bad value at step 6; log: " in error
    assert len(starts(path)) == 3
    (failed,) = events(path, Kind.RUN_FAILED)
    assert failed["step"] == 6


def test_a_flapping_rank_interrupts_the_others_no_more_often_than_allowed(run: Run) -> None:
    """Case 6: it makes four steps in each incarnation, so that only the budget can end it."""
    faults = [f"raise:2:{step}:{count}" for count, step in enumerate((5, 9, 13, 17), 1)]
    said, path = run("40", *faults, options=("--max-restarts", "2"))
    assert said.returncode == 1
    assert "error: all 2 restarts are used up; the last: rank 2 failed at step 13" in said.stderr
    assert len(starts(path)) == 3
    assert len(events(path, Kind.RANK_LOST)) == 3


def test_a_rank_that_ignores_sigterm_holds_nobody_up_for_long(run: Run) -> None:
    said, path = run("20", "deaf:0:9:1", "SIGKILL:1:10:1", options=("--grace-s", "0.2"))
    assert said.returncode == 0, said.stderr
    assert len(starts(path)) == 2


def test_what_ranks_leave_behind_is_ended_before_the_next_start(run: Run) -> None:
    before = _helpers()
    said, _ = run("20", "child:1:10:1", options=FEW_S)
    assert said.returncode == 0, said.stderr
    assert _helpers() == before


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_everything(cli: Cli, tmp_path: Path, times: int) -> None:
    """With one rank that does not listen the first time."""
    path, work = tmp_path / "run", tmp_path / "work"
    work.mkdir()
    fault = ("deaf:1:2:9",) if times == 2 else ()
    program = (sys.executable, SCRIPT, work, "1000000", *fault)
    spares = ("--spares", "1", "--preload", "decimal")
    command = ("run", "--nproc", "3", "--run-dir", path, *spares, "--quiet", "--", *program)
    with cli.started(*command) as running:
        running.wait_for(lambda: (work / "saved").exists() and _children(running) == 4)
        pids = children(running.process.pid)
        for count in range(times):
            running.signal(signal.SIGINT)
            if count + 1 < times:
                running.wait_for(lambda: _children(running) <= 2)
        done = running.end()
    assert done.returncode == 130, done.stderr
    assert all_end(pids)
    (stopped,) = events(path, Kind.RUN_INTERRUPTED)
    assert stopped["step"] >= 3


def test_ranks_and_spares_do_not_outlive_a_supervisor_that_is_killed(
    cli: Cli, tmp_path: Path
) -> None:
    path, work = tmp_path / "run", tmp_path / "work"
    work.mkdir()
    program = (sys.executable, SCRIPT, work, "1000000")
    command = ("run", "--nproc", "2", "--run-dir", path, "--spares", "1", "--quiet", "--", *program)
    with cli.started(*command) as running:
        running.wait_for(lambda: _children(running) == 3)
        pids = children(running.process.pid)
        running.process.kill()
        assert all_end(pids)


def test_spares_take_over_with_their_imports_done(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module tells who imported it: for the restart that is a spare."""
    (tmp_path / "heavy.py").write_text("import os, sys; os.write(2, b'imported\\n')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("STEP_S", "0.1")  # time for the spares
    spares = ("--spares", "3", "--preload", "heavy")
    said, path = run("24", "SIGKILL:1:20:1", options=spares)
    assert said.returncode == 0, said.stderr
    assert [event["warm"] for event in starts(path)] == [0, 3]
    assert said.stdout.splitlines()[-1] == "step 24 of incarnation 1"
    logs = [path / "logs" / f"spare-{number}.log" for number in range(3)]
    assert [log.read_text() for log in logs] == ["imported\n"] * 3


def test_spares_that_cannot_import_are_given_up_and_harm_nobody(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_S", "0.1")
    said, path = run("24", "SIGKILL:1:20:1", options=("--spares", "2", "--preload", "no_such"))
    assert said.returncode == 0, said.stderr
    assert [event["warm"] for event in starts(path)] == [0, 0]
    (alert,) = events(path, Kind.ALERT)
    assert "ModuleNotFoundError: No module named 'no_such'" in alert["what"]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--", "no-such-program"), "no-such-program: no such program; give one after --"),
        (("--", sys.executable, "no.py"), "no.py: no such script; give the path of one"),
        (("--longest-stall-s", "0", "--", "true"), "--longest-stall-s 0: not a time in seconds"),
        (("--spares", "1", "--", "true"), "--spares 1: a spare can run `python SCRIPT` and"),
        (("--preload", "x", "--", "true"), "--preload x: is for spares; add --spares N"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    cli: Cli, args: tuple[str, ...], line: str
) -> None:
    assert line in one_error_line(cli.run("run", *args), 2)
    assert list(cli.cwd.iterdir()) == []


def test_any_program_can_be_run_and_its_options_are_its_own(cli: Cli) -> None:
    said = cli.ok("run", "--nproc", "2", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE", "--nproc")
    assert said.stdout == "0 of 2\n"
    assert (cli.cwd / "runs" / "sh-1" / "logs" / "rank-1.log").read_text() == "1 of 2\n"


def test_a_reader_that_has_had_enough_ends_nothing(cli: Cli, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    program = (sys.executable, SCRIPT, work, "30")
    with cli.started("run", "--nproc", "2", "--", *program) as running:
        assert running.process.stdout
        running.process.stdout.readline()
        running.process.stdout.close()
        done = running.end()
    assert done.returncode == 0, done.stderr
    assert (work / "done-1").exists()


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_real_ddp_script_ends_with_the_weights_of_an_undisturbed_run(
    run: Run, tmp_path: Path, ddp_weights: bytes, number: str
) -> None:
    """With as many spares as ranks, which have imported torch."""
    script = HERE / "foreign_ddp.py"
    fault, spares = (number, "1", "23"), ("--spares", "2", "--preload", "torch")
    said, path = run("40", *fault, nproc=2, script=script, options=spares)
    assert said.returncode == 0, said.stderr
    assert len(starts(path)) == 2
    assert (tmp_path / "work" / "weights").read_bytes() == ddp_weights


@pytest.fixture(scope="module")
def ddp_weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _undisturbed(tmp_path_factory.mktemp("ddp"), "foreign_ddp.py", 40)


def _undisturbed(tmp_path: Path, script: str, steps: int, *options: str) -> bytes:
    home = tmp_path / "undisturbed"
    home.mkdir()
    program = (sys.executable, HERE / script, home, str(steps))
    Cli(home, home).ok("run", "--nproc", "2", *options, "--", *program)
    return (home / "weights").read_bytes()


@pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="jax is not installed: pip install jax"
)
def test_a_real_jax_script_ends_with_the_weights_of_an_undisturbed_run(
    run: Run, tmp_path: Path
) -> None:
    weights = _undisturbed(tmp_path, "foreign_jax.py", 12, "--jax")
    script = HERE / "foreign_jax.py"
    said, path = run("12", "SIGKILL", "1", "7", nproc=2, script=script, options=("--jax",))
    assert said.returncode == 0, said.stderr
    assert len(starts(path)) == 2
    assert (tmp_path / "work" / "weights").read_bytes() == weights


def _children(running: Running) -> int:
    return len(children(running.process.pid))


def _helpers() -> set[int]:
    """Processes that do nothing for ever, as the child of a rank does."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(b"sleep(1e6)" in word for word in words):
            found.add(int(entry.name))
    return found
