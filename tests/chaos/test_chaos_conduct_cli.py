"""`meshwright train` of a run that survives, from the command line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from meshwright.conduct.rundir import living_agents, read_lines

LIMIT_S = 120.0
STEPS = 60
JOB = f"""
[job]
steps = {STEPS}
eval_every = 1000
eval_sequences = 4
[model]
preset = "tiny"
[data]
source = "python-stdlib"
seq_len = 32
global_batch = 8
[layout]
dp_replicate = 2
micro_batch = 1
[cluster]
ref = "local:2"
[checkpoint]
every = 1000
[resilience]
redundancy = "auto"
on_no_spare = "wait"
"""


def meshwright(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """The command, under way."""
    command = [sys.executable, "-m", "meshwright.cli.main", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for(what: Callable[[], object]) -> None:
    """Until `what` is true; not for ever."""
    deadline_s = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def steps(run: Path) -> list[int]:
    """The steps with metrics so far."""
    path = run / "metrics.jsonl"
    return [line["step"] for line in read_lines(path)] if path.exists() else []


def test_resume_takes_up_a_run_whose_conductor_was_killed(tmp_path: Path) -> None:
    job, run = tmp_path / "job.toml", tmp_path / "run"
    job.write_text(JOB)
    many = 5 * STEPS  # so that it is not over before its heir is there, on a busy machine
    begin = ["train", str(job), "--run-dir", str(run), "-o", f"job.steps={many}"]
    with meshwright(begin) as first:
        wait_for(lambda: len(steps(run)) >= 3)
        first.kill()
    assert living_agents(run) == [0]
    with meshwright(["train", str(run), "--resume", "-o", "job.steps=5"]) as refused:
        assert refused.stderr is not None
        said = refused.stderr.read()
    assert refused.returncode == 2
    assert "still train, and keep the job they began with; leave it out" in said
    with meshwright(["train", str(run), "--resume"]) as heir:
        assert heir.stderr is not None
        said = heir.stderr.read()
    assert heir.returncode == 0, said
    # No checkpoint was there to go back to: the workers went on all the while.
    assert steps(run) == list(range(1, many + 1))
    starts = [e for e in read_lines(run / "events.jsonl") if e["kind"] == "run_started"]
    assert [start.get("adopted") for start in starts] == [None, True]
    assert (run / "report.html").is_file()
    wait_for(lambda: not living_agents(run))


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The stored events of `kind`."""
    path = run / "events.jsonl"
    return [e for e in read_lines(path) if e["kind"] == kind] if path.exists() else []


def test_a_node_whose_agent_is_started_by_hand_leaves_and_comes_back(tmp_path: Path) -> None:
    job, run = tmp_path / "job.toml", tmp_path / "run"
    more = "[cluster]\nspares = 2\nnodes = 2\n"
    job.write_text(JOB.replace("[cluster]\n", more) + "longest_stall_s = 10.0\n")
    agent = ["job", "agent", str(run), "--node", "1"]
    with meshwright(agent) as early:
        assert early.stderr is not None and "no run that survives losses" in early.stderr.read()
    assert early.returncode == 2
    with ExitStack() as stack:

        def begin(*words: str) -> subprocess.Popen[str]:
            process = stack.enter_context(meshwright(words))
            stack.callback(process.kill)
            return process

        steps_wanted = f"job.steps={10 * STEPS}"
        conductor = begin(
            *("train", str(job), "--run-dir", str(run), "--nodes-here", "0", "-o", steps_wanted)
        )
        wait_for((run / "conductor.json").exists)
        first = begin(*agent)
        wait_for(lambda: len(steps(run)) >= 10)
        first.send_signal(signal.SIGTERM)
        assert first.wait(LIMIT_S) == 130
        wait_for(lambda: events(run, "takeover_done"))
        again = begin(*agent)
        wait_for(lambda: events(run, "node_back"))
        known = [event["member"] for event in events(run, "spare_ready")]
        wait_for(lambda: {e["member"] for e in events(run, "spare_ready")} - set(known))
        conductor.send_signal(signal.SIGTERM)
        assert conductor.wait(LIMIT_S) == 130
        assert again.wait(LIMIT_S) == 0
    [done] = events(run, "takeover_done")
    assert (done["ranks"], done["lost_steps"]) == ([1], 0)
    assert steps(run) == list(range(1, steps(run)[-1] + 1))
