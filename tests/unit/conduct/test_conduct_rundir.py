"""A run directory: one writer, no torn line, nothing overwritten."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import InputError, RunError
from meshwright.base.events import Kind
from meshwright.conduct.rundir import RunDir, read_lines

HOLDER = """
import sys
from pathlib import Path
from meshwright.conduct.rundir import RunDir
run = RunDir.create_at(Path(sys.argv[1]))
run.append_event({"kind": "run_started"})
print("held", flush=True)
sys.stdin.read()
"""


def metrics(run: RunDir, *steps: int) -> None:
    for step in steps:
        run.append_metrics({"ts": 1.0, "kind": Kind.METRICS, "rank": 0, "step": step, "loss": 0.5})


def test_ids_count_up_and_are_never_used_again(tmp_path: Path) -> None:
    (tmp_path / "runs" / "x-7").mkdir(parents=True)
    (tmp_path / "runs" / "x-y-9").mkdir()
    with RunDir.create(tmp_path / "runs", "x") as run:
        assert run.path == tmp_path / "runs" / "x-8"
        assert run.logs.is_dir() and run.checkpoints.is_dir()
    with RunDir.create(tmp_path / "new", "x") as run:
        assert run.id == "x-1"


def test_a_name_taken_in_the_same_moment_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x-1").mkdir()
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(()))
    with RunDir.create(tmp_path, "x") as run:
        assert run.id == "x-2"


def test_events_are_numbered_across_incarnations(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "x") as run:
        first = run.append_event({"kind": Kind.RUN_STARTED, "world": 2})
        run.append_event({"ts": 5.0, "kind": Kind.RANK_READY, "rank": 1})
        path = run.path
    assert (first["seq"], first["run"], first["incarnation"]) == (1, "x-1", 1)
    with RunDir.open_existing(path) as run:
        assert run.incarnation == 1
        run.append_event({"kind": Kind.RUN_STARTED})
    events = list(read_lines(path / "events.jsonl"))
    assert [(e["seq"], e["incarnation"]) for e in events] == [(1, 1), (2, 1), (3, 2)]
    assert events[1]["ts"] == 5.0 and events[1]["kind"] == "rank_ready"


def test_metrics_hold_the_step_and_not_the_envelope(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "x") as run:
        metrics(run, 1)
        assert run.metrics.read_text() == '{"step":1,"loss":0.5}\n'


def test_resuming_drops_the_steps_to_be_done_again_and_a_torn_line(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "x") as run:
        metrics(run, 1, 2, 3, 4)
        run.append_event({"kind": Kind.RUN_STARTED})
    with run.metrics.open("ab") as file:
        file.write(b'{"step":5,"lo')
    with run.events.open("ab") as file:
        file.write(b'{"seq":2,')
    assert [line["step"] for line in read_lines(run.metrics)] == [1, 2, 3, 4]
    with RunDir.open_existing(run.path) as resumed:
        resumed.drop_metrics_after(2)
        metrics(resumed, 3)
        resumed.append_event({"kind": Kind.RUN_STARTED})
    assert [line["step"] for line in read_lines(run.metrics)] == [1, 2, 3]
    assert [line["seq"] for line in read_lines(run.events)] == [1, 2]
    assert not list(run.path.glob(".*.partial"))


def test_a_directory_in_use_names_its_holder_and_is_free_after_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "x"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            for attempt in (RunDir.open_existing, RunDir.create_at):
                with pytest.raises(InputError) as refused:
                    attempt(path)
                assert f"{path}: in use by process {holder.pid}; wait" in str(refused.value)
                assert refused.value.exit_code == 2
                assert "\n" not in str(refused.value)
        finally:
            holder.send_signal(signal.SIGKILL)
    with RunDir.open_existing(path) as run:
        assert run.incarnation == 1


def test_an_own_second_opening_is_refused_too(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "x") as run:
        with pytest.raises(InputError, match=f"in use by process {os.getpid()}"):
            RunDir.open_existing(run.path)
        run.append_event({"kind": Kind.RUN_STARTED})
    run.close()


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match=r"not empty; give another directory, or go on .*--resume"):
        RunDir.create_at(tmp_path)
    with pytest.raises(InputError, match="not empty"):
        RunDir.create_at(tmp_path / "mine.txt")
    with pytest.raises(InputError, match="not a run directory"):
        RunDir.open_existing(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(InputError, match=r"cannot be written .*; give another directory"):
        RunDir.create(tmp_path / "mine.txt", "x")


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"step": 1}'])
def test_a_file_that_is_not_ours_is_refused_and_let_go(tmp_path: Path, line: str) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text(line + "\n")
    for _ in range(2):  # the second time it would be in use, had the first kept its lock
        with pytest.raises(InputError, match=r"events\.jsonl.*(not a JSON object|other things)"):
            RunDir.open_existing(tmp_path)
    assert events.read_text() == line + "\n"


def test_whole_files_and_a_full_disk(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "x") as run:
        written = run.write_text("plan.json", json.dumps({"a": 1}))
        assert written.read_text() == '{"a": 1}'
        run.metrics.unlink()
        run.metrics.symlink_to("/dev/full")
        with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be written \(No space left"):
            metrics(run, 1)


def test_what_a_checkpoint_kept_is_written_down_once(tmp_path: Path) -> None:
    """The conductor died with step 3 and its evaluation unwritten; the checkpoint has both."""
    said: list[dict[str, Any]] = [
        *({"kind": Kind.METRICS, "step": step, "loss": 1.0 / step} for step in (1, 2, 3)),
        {"kind": Kind.EVALUATED, "step": 3, "loss": 0.5},
    ]
    with RunDir.create_at(tmp_path / "run") as rundir:
        rundir.append_event({"kind": Kind.RUN_STARTED})
        for message in said[:2]:
            rundir.append_metrics(message)
    for _ in range(2):
        with RunDir.open_existing(tmp_path / "run") as rundir:
            rundir.restore(said)
            steps = [line["step"] for line in read_lines(rundir.metrics)]
            events = list(read_lines(rundir.events))
        assert steps == [1, 2, 3]
        assert [event["kind"] for event in events] == [Kind.RUN_STARTED, Kind.EVALUATED]
        assert [event["seq"] for event in events] == [1, 2]
