"""What conductor, agents and lines between them may suffer, over real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from surviving_scene import Scene, make_job

from meshwright.base.errors import InputError
from meshwright.base.events import Kind
from meshwright.conduct.asking import ask
from meshwright.conduct.conductor import Status
from meshwright.conduct.rundir import RunDir, living_agents, read_lines

HERE = Path(__file__).parent
HELPERS = HERE.parent / "unit" / "conduct"
LIMIT_S = 30.0


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("PYTHONPATH", str(HELPERS), prepend=os.pathsep)
    return Scene(tmp_path)


def wait_for(what: Callable[[], object]) -> None:
    """Until `what` is true; not for ever."""
    deadline_s = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


def test_an_agent_that_dies_takes_its_ranks_along_and_spares_replace_them(scene: Scene) -> None:
    job = make_job(4, cluster={"spares": 4, "nodes": 2})

    def kill() -> None:
        pid = scene.fleet.pid(0)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    scene.once(Kind.METRICS, kill, step=5)
    outcome = scene.play(job, steps=100, step_s=0.01)
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    [done] = scene.events(Kind.TAKEOVER_DONE)
    assert done["ranks"] == [0, 1]
    assert done["cause"] == "the agent of node 0 died"
    assert scene.steps() == list(range(1, 101))


def test_without_spares_its_node_is_started_again(scene: Scene) -> None:
    job = make_job(4, cluster={"nodes": 2}, resilience={"on_no_spare": "wait"})

    def kill() -> None:
        pid = scene.fleet.pid(1)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    scene.once(Kind.METRICS, kill, step=5)
    outcome = scene.play(job, steps=100)
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    [done] = scene.events(Kind.TAKEOVER_DONE)
    # Whoever of the two is ready first comes first.
    assert (sorted(done["members"]), sorted(done["members"].values())) == (["2", "3"], [4, 5])


def test_a_cut_line_is_told_once_and_restarts_nobody(scene: Scene) -> None:
    job = make_job(4, cluster={"spares": 2, "nodes": 2}, resilience={"longest_stall_s": 3.0})
    scene.once(Kind.METRICS, lambda: scene.fleet.cut(1, 2.0), step=5)
    outcome = scene.play(job, steps=400, step_s=0.01)
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    assert len(scene.events(Kind.ALERT)) == 1
    assert not scene.events(Kind.RANK_LOST)
    assert scene.steps() == list(range(1, 401))


@contextlib.contextmanager
def conductor(folder: Path, steps: int) -> Iterator[subprocess.Popen[bytes]]:
    """A run in `folder` whose conductor is a process of its own."""
    command = [sys.executable, str(HERE / "chaos_conductor.py"), str(folder), str(steps)]
    path = os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as process:
        try:
            yield process
        finally:
            process.kill()


def count_steps(run: Path) -> int:
    """Steps with metrics so far."""
    path = run / "metrics.jsonl"
    return sum(1 for _ in read_lines(path)) if path.exists() else 0


def test_a_run_goes_on_without_its_conductor_and_takes_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HELPERS), prepend=os.pathsep)
    run, state = tmp_path / "run", tmp_path / "state"
    with conductor(tmp_path, 800) as process:
        wait_for(lambda: count_steps(run) >= 20)
        process.kill()
    at_death = int((state / "rank-0").read_text())
    wait_for(lambda: int((state / "rank-0").read_text()) > at_death + 20)
    assert living_agents(run) == [0, 1]
    scene = Scene(tmp_path)
    outcome = scene.play(make_job(4, cluster={"spares": 2, "nodes": 2}), adopt=True, steps=800)
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    assert scene.steps() == list(range(1, 801))  # those of the time between, too
    assert not scene.events(Kind.RANK_LOST)
    wait_for(lambda: not living_agents(run))


def test_what_was_lost_without_a_conductor_is_made_good_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HELPERS), prepend=os.pathsep)
    run = tmp_path / "run"
    with conductor(tmp_path, 300) as killed:
        wait_for(lambda: count_steps(run) >= 20)
        killed.kill()
    victim = next(
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdigit() and _logs_to(process, run / "logs" / "member-1.log")
    )
    os.kill(victim, signal.SIGKILL)
    scene = Scene(tmp_path)
    outcome = scene.play(make_job(4, cluster={"spares": 2, "nodes": 2}), adopt=True, steps=300)
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    [done] = scene.events(Kind.TAKEOVER_DONE)
    assert done["ranks"] == [1] and done["epoch"] > 1_000_000
    assert scene.steps() == list(range(1, 301))


def _logs_to(process: Path, log: Path) -> bool:
    with contextlib.suppress(OSError):
        return (process / "fd" / "1").readlink() == log
    return False


def test_resizing_up_and_down(scene: Scene) -> None:
    answers: list[dict[str, object]] = []

    def ask_for(size: int) -> None:
        request = {"op": "resize", "layout": {"dp_replicate": size}}
        threading.Thread(target=lambda: answers.append(ask(scene.rundir.path, request))).start()

    def on_event(message: dict[str, object]) -> None:
        match message["kind"], message.get("step"):
            case Kind.METRICS, 5:
                ask_for(5)
            case Kind.METRICS, 8:
                ask_for(6)
            case Kind.RESIZED, _ if message["after"] == "dp6":
                ask_for(2)

    scene.on_event = on_event
    outcome = scene.play(make_job(4, cluster={"spares": 2}), steps=400, step_s=0.01)
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    sizes = [(event["before"], event["after"]) for event in scene.events(Kind.RESIZED)]
    assert sizes == [("dp4", "dp6"), ("dp6", "dp2")]
    refused, *taken = answers
    assert str(refused["error"]).startswith("dp_replicate = 5: this job runs with 1, 2, 3, 4, 6")
    assert [(answer["accepted"], answer["layout"]) for answer in taken] == [
        ({"dp_replicate": 6}, "dp6"),
        ({"dp_replicate": 2}, "dp2"),
    ]
    assert scene.steps() == list(range(1, 401))


def test_a_stranger_is_not_let_in(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    strangers: list[socket.socket] = []

    def call() -> None:
        assert scene.fleet.address is not None
        stranger = socket.create_connection(scene.fleet.address)
        stranger.sendall(b'{"nonce":"x","proof":"y","hello":{"node":0}}\n')
        strangers.append(stranger)

    scene.once(Kind.METRICS, call, step=3)
    outcome = scene.play(make_job(2), steps=100, step_s=0.01)
    assert outcome.status is Status.FINISHED
    assert "refused a connection that did not prove itself" in caplog.text
    assert strangers[0].recv(1 << 12)  # the nonce, and nothing after it
    assert strangers[0].recv(1 << 12) == b""
    strangers[0].close()


def test_asking_where_nobody_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run that survives losses"):
        ask(tmp_path, {"op": "resize"})
    with RunDir.create_at(tmp_path / "run") as rundir:
        rundir.secret()
        rundir.write_text("conductor.json", '{"address": ["127.0.0.1", 9]}')
    with pytest.raises(InputError, match="nobody conducts it now"):
        ask(tmp_path / "run", {"op": "resize"})
