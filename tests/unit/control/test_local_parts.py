"""What engine `local` decides by itself: its clusters, what events mean, who is where."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import ConfigError
from meshwright.base.events import Kind
from meshwright.control.engines import launch
from meshwright.control.engines.launch import Launched
from meshwright.control.engines.local_chips import places
from meshwright.control.engines.local_spec import refuse
from meshwright.control.engines.processes import ProcessId, hands, kill, lives, process_id, send
from meshwright.control.engines.runs import Follower, Told, complaint, end_of, last_step, state_of
from meshwright.control.spec import ClusterSpec, Network, Storage
from meshwright.control.words import RunState


def local(**asked: Any) -> ClusterSpec:
    return ClusterSpec(name="here", engine="local", **asked)


@pytest.mark.parametrize(
    "asked", [{}, {"instance": "local"}, {"nodes": 32}, {"chips_per_node": 64}]
)
def test_clusters_that_can_be_made(asked: dict[str, Any]) -> None:
    refuse(local(**asked))


@pytest.mark.parametrize(
    ("key", "asked"),
    [
        ("nodes", {"nodes": 33}),
        ("nodes", {"nodes": 5, "chips_per_node": 64}),
        ("instance", {"instance": "p5"}),
        ("memory_gib_per_chip", {"memory_gib_per_chip": 1.0}),
        ("storage", {"storage": Storage(nodes=2)}),
        ("network", {"network": Network(topology="switch")}),
        ("seed", {"seed": 1}),
        ("speed", {"speed": 10.0}),
        ("partition", {"partition": "gpu"}),
        ("namespace", {"namespace": "team"}),
    ],
)
def test_clusters_that_cannot_name_the_key(key: str, asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse(local(**asked))
    assert refused.value.key == key
    assert "\n" not in str(refused.value)


def write(run: Path, *events: dict[str, Any], torn: str = "") -> None:
    run.mkdir(exist_ok=True)
    with (run / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events) + torn)


STARTED = {"kind": Kind.RUN_STARTED}
READY = [{"kind": Kind.RANK_READY, "rank": rank} for rank in range(2)]


def test_events_are_followed_to_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    follower = Follower(run)
    assert follower.look() == Told()
    write(run, STARTED, READY[0], torn='{"kind": "rank_rea')
    assert state_of(follower.look(), 2) is RunState.STARTING
    write(run, torn='dy", "rank": 1}\n')
    assert state_of(follower.look(), 2) is RunState.RUNNING
    write(run, {"kind": Kind.RUN_FAILED, "error": "rank 1 died"})
    assert follower.look() == Told(True, frozenset({0, 1}), Kind.RUN_FAILED, "rank 1 died")
    assert Follower(run).look() == follower.look(), "another service sees the same"
    write(run, STARTED)  # by a conductor that adopts the ranks: they are not ready again
    assert follower.look().end is None
    assert state_of(follower.look(), 2) is RunState.RUNNING


def test_an_attempt_is_told_of_by_its_own_events_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, STARTED, *READY, {"kind": Kind.RUN_INTERRUPTED})
    later = Follower(run, (run / "events.jsonl").stat().st_size)
    assert later.look() == Told()
    write(run, STARTED, READY[1])
    assert later.look() == Told(True, frozenset({1}))


def test_a_run_that_begins_anew_is_read_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, STARTED, *READY)
    follower = Follower(run)
    follower.look()
    run.rename(tmp_path / "aside")
    write(run, STARTED)
    assert follower.look() == Told(True)


@pytest.mark.parametrize(
    ("told", "code", "state", "message"),
    [
        (Told(True, end=Kind.RUN_FINISHED), 0, RunState.FINISHED, ""),
        (Told(True, end=Kind.RUN_INTERRUPTED), 130, RunState.STOPPED, ""),
        (Told(True, end=Kind.RUN_FAILED, error="rank 1 died"), 1, RunState.FAILED, "rank 1 died"),
        (Told(True, end=Kind.RUN_FINISHED), 1, RunState.FAILED, "no space left"),
        (Told(), 2, RunState.FAILED, "no space left"),
        (Told(True), None, RunState.LOST, "its conductor was killed, and no agent lives"),
        (Told(True, end=Kind.RUN_FAILED, error="x"), None, RunState.FAILED, "x"),
        (Told(True, end=Kind.RUN_INTERRUPTED), None, RunState.STOPPED, ""),
    ],
)
def test_how_an_attempt_ended(told: Told, code: int | None, state: RunState, message: str) -> None:
    assert end_of(told, code, "no space left") == (state, message)


def test_the_last_words_of_a_log_and_of_metrics(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    assert complaint(log) == ""
    log.write_text("error: of an earlier attempt\n")
    begin = log.stat().st_size
    with log.open("a") as file:
        file.write("data is prepared\nerror: job.steps = 0: too few\n")
    assert complaint(log, begin) == "job.steps = 0: too few"
    assert complaint(log, log.stat().st_size) == ""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert last_step(tmp_path) == 2


def test_the_lock_lives_as_long_as_a_copy_of_its_descriptor(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert not launch.is_held(run)
    assert launch.read(run) is None
    lock = launch.acquire(run)
    assert lock is not None
    assert launch.acquire(run) is None
    launch.write(lock, Launched(1, 10, 11))
    launch.write(lock, Launched(2, 1, 1))
    assert launch.read(run) == Launched(2, 1, 1), "nothing is left of what it said before"
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[lock]) as child:
        os.close(lock)
        assert launch.is_held(run)
        child.kill()
    assert not launch.is_held(run)


def test_processes_are_told_apart_and_found_by_their_logs(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (logs / "member-3.log").open("w") as log:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log)
    found = process_id(child.pid)
    assert found is not None
    assert hands(tmp_path).ranks == {3: found}
    other = ProcessId(found.pid, found.start + 1)
    assert not send(other, signal.SIGKILL), "a process that had this number before"
    assert lives(found)
    kill([found])
    assert not lives(found)
    assert not hands(tmp_path).all
    child.communicate()


def test_who_is_on_which_chip() -> None:
    one, two, three, four = (ProcessId(pid, 1) for pid in range(4))
    chips = ((0, 0), (0, 1), (1, 0))
    assert places(chips, {0: one, 1: two}) == {(0, 0): one, (0, 1): two}
    assert places(chips, {0: one, 2: two, 3: three, 4: four}) == {
        (0, 0): one,
        (1, 0): two,
        (0, 1): three,
    }
