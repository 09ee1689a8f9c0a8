"""A run from its first event to its last, over real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.events import Kind
from meshwright.conduct.conductor import Outcome, Status, run
from meshwright.conduct.decide import Patience
from meshwright.conduct.local import LocalEngine
from meshwright.conduct.rundir import RunDir, read_lines
from meshwright.conduct.signals import StopSignals

HERE = Path(__file__).parent
WORLD = 4
SAVE_LOST = "stopped before its state was saved; --resume goes on from the last checkpoint"


class Seen:
    """The live view of a test: what it was shown, and a user who stops after some event."""

    def __init__(self, stop_at: Mapping[Kind, int] | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.stop_at = stop_at or {}

    def __call__(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def stops(self) -> int:
        """One request for each kind in `stop_at` that was seen as often as it says."""
        kinds = [message["kind"] for message in self.messages]
        return sum(kinds.count(kind) >= times for kind, times in self.stop_at.items())


class Scene:
    """One engine and one run directory."""

    def __init__(self, engine: LocalEngine, rundir: RunDir) -> None:
        self.engine, self.rundir = engine, rundir
        self.pids: tuple[int, ...] = ()
        self.wait_warm, self.stop, self.poll = engine.wait_warm, engine.stop, engine.poll

    def launch(
        self, entry: str, world: int, log_dir: Path, args: Mapping[str, Any]
    ) -> tuple[int, ...]:
        self.pids = self.engine.launch(entry, world, log_dir, args)
        return self.pids

    def play(
        self,
        entry: str,
        args: Mapping[str, Any],
        seen: Seen | None = None,
        stops: Callable[[], int] | None = None,
        **options: Any,
    ) -> Outcome:
        seen = seen or Seen()
        stops = stops or seen.stops
        entry = f"fake_trainer:{entry}"
        return run(self, self.rundir, entry, WORLD, args, seen, stops, **options)

    def events(self) -> list[dict[str, Any]]:
        return list(read_lines(self.rundir.events))

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events()]

    def all_gone(self) -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in self.pids)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    with RunDir.create(Path("runs"), "x") as rundir, LocalEngine.start("fake_trainer") as engine:
        yield Scene(engine, rundir)


def act(rank: int, at: int | str, do: str, **more: Any) -> dict[str, Any]:
    return {str(rank): {"at": at, "do": do, **more}}


def act_args(acts: dict[str, Any]) -> dict[str, Any]:
    return {"acts": acts}


ALL_WAIT = act_args({str(rank): {"at": 0, "do": "wait"} for rank in range(WORLD)})


def test_a_run_that_finishes(scene: Scene) -> None:
    seen = Seen()
    outcome = scene.play("steps", {"steps": 3}, seen, started={"layout": {"dp": 4}})
    assert (outcome.status, outcome.step, outcome.error) == (Status.FINISHED, 3, None)
    ready = ["rank_ready"] * WORLD
    assert scene.kinds() == ["run_started", *ready, "run_finished"]
    first, *_, last = scene.events()
    assert (first["world"], first["layout"], first["incarnation"]) == (WORLD, {"dp": 4}, 1)
    assert (last["step"], last["seq"], last["run"]) == (3, 6, "x-1")
    assert [line["step"] for line in read_lines(scene.rundir.metrics)] == [1, 2, 3]
    assert len(seen.messages) == len(scene.events()) + 3 + 3 * WORLD  # metrics and progress


def test_two_runs_over_one_warm_launcher(scene: Scene) -> None:
    assert scene.play("steps", act_args(act(1, 2, "SIGKILL"))).status is Status.FAILED
    outcome = scene.play("steps", {"steps": 2}, started={"resumed_from": 1})
    assert outcome.status is Status.FINISHED
    assert [e["incarnation"] for e in scene.events() if e["kind"] == "run_started"] == [1, 2]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_killed_rank_is_named_and_no_other_is_left(scene: Scene, name: str) -> None:
    others = {k: v for rank in (0, 1, 2) for k, v in act(rank, 3, "wait").items()}
    outcome = scene.play("steps", act_args({**others, **act(3, 2, name)}))
    pid = scene.pids[3]
    log = "runs/x-1/logs/rank-3.log"
    assert outcome.error == f"rank 3 died at step 2 by {name} (pid {pid}); log: {log}"
    assert outcome.status is Status.FAILED
    assert scene.all_gone()
    # The others would have waited until they gave up by themselves: they were not given that long.
    logs = [(scene.rundir.logs / f"rank-{peer}.log").read_text() for peer in range(WORLD)]
    assert not any("TimeoutError" in log for log in logs)
    lost, failed = scene.events()[-2:]
    assert {key: lost[key] for key in ("kind", "rank", "step", "pid", "signal", "exit_code")} == {
        "kind": "rank_lost", "rank": 3, "step": 2, "pid": pid, "signal": name, "exit_code": None,
    }  # fmt: skip
    assert (lost["log"], failed["kind"], failed["error"]) == (log, "run_failed", outcome.error)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("slow_s", [0.0, 0.1])
def test_a_cascade_is_traced_to_the_rank_that_raised(
    scene: Scene, rank: int, slow_s: float
) -> None:
    # A slow rank closes its connections first and ends last: its peers fail before it.
    args = {**act_args(act(rank, 2, "raise")), "slow_s": slow_s}
    outcome = scene.play("cascade", args, patience=Patience(settle_s=10.0))
    assert outcome.error == (
        f"rank {rank} failed at step 2 with exit code 1: ValueError: bad value on rank {rank}; "
        f"log: runs/x-1/logs/rank-{rank}.log"
    )
    logs = [(scene.rundir.logs / f"rank-{peer}.log").read_text() for peer in range(WORLD)]
    assert all("Traceback" in log for log in logs)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_cascade_is_traced_to_the_rank_that_was_killed(scene: Scene, rank: int) -> None:
    args = act_args(act(rank, 2, "SIGKILL"))
    outcome = scene.play("cascade", args, patience=Patience(settle_s=10.0))
    assert outcome.error is not None
    assert outcome.error.startswith(f"rank {rank} died at step 2 by SIGKILL")


@pytest.mark.parametrize("do", ["sys.exit", "os._exit"])
def test_a_rank_that_leaves_early_fails_the_run(scene: Scene, do: str) -> None:
    outcome = scene.play("steps", act_args({**act(1, 2, do), **act(0, 3, "wait")}))
    assert outcome.error is not None
    assert outcome.error.startswith("rank 1 left at step 2 with exit code 0, its work undone; log")
    assert scene.all_gone()


def test_a_silent_exit_does_not_borrow_the_last_line_of_an_earlier_run(scene: Scene) -> None:
    scene.play("steps", act_args(act(1, 1, "raise")))
    outcome = scene.play("steps", act_args(act(1, 1, "os._exit", code=7)))
    assert outcome.error is not None
    assert "rank 1 failed at step 1 with exit code 7: it wrote nothing; log" in outcome.error


def test_a_rank_that_never_stepped(scene: Scene) -> None:
    outcome = scene.play("until_stopped", act_args(act(2, 0, "SIGKILL")))
    assert outcome.error is not None
    assert outcome.error.startswith("rank 2 died before its first step by SIGKILL")


def test_stopping_once_saves(scene: Scene) -> None:
    outcome = scene.play("until_stopped", {}, Seen({Kind.RANK_READY: WORLD}))
    assert (outcome.status, outcome.step, outcome.error) == (Status.INTERRUPTED, 7, None)
    assert scene.kinds().count("run_interrupted") == 1
    assert scene.kinds()[-1] == "run_interrupted"
    assert scene.events()[-1]["step"] == 7


def test_stopping_twice_kills(scene: Scene) -> None:
    seen = Seen({Kind.RANK_READY: WORLD})
    outcome = scene.play(
        "until_stopped", ALL_WAIT, seen, lambda: 2 * seen.stops(), started={"resumed_from": 5}
    )
    assert (outcome.status, outcome.step, outcome.error) == (Status.INTERRUPTED, 5, SAVE_LOST)
    assert scene.pids and scene.all_gone()


def test_workers_that_do_not_end_are_killed_when_the_grace_is_over(scene: Scene) -> None:
    seen = Seen({Kind.RANK_READY: WORLD})
    outcome = scene.play("until_stopped", ALL_WAIT, seen, patience=Patience(stop_s=0.2))
    assert (outcome.status, outcome.error) == (Status.INTERRUPTED, SAVE_LOST)
    assert scene.all_gone()


def test_our_own_sigterm_is_no_failure(scene: Scene) -> None:
    outcome = scene.play("until_stopped", {"deaf": True}, Seen({Kind.RANK_READY: WORLD}))
    assert (outcome.status, outcome.error) == (Status.INTERRUPTED, SAVE_LOST)


def test_a_failure_while_stopping_is_a_failure(scene: Scene) -> None:
    args = act_args(act(1, "stop", "raise"))
    outcome = scene.play("until_stopped", args, Seen({Kind.RANK_READY: WORLD}))
    assert outcome.status is Status.FAILED
    assert outcome.error is not None and "ValueError: bad value on rank 1" in outcome.error


def test_stopping_before_the_launch(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene, "wait_warm", lambda _: False)
    outcome = scene.play("steps", {}, stops=lambda: 1)
    assert (outcome.status, outcome.error) == (Status.INTERRUPTED, SAVE_LOST)
    assert scene.pids == ()


def test_nonsense_on_the_pipe_is_dropped(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    outcome = scene.play("steps", act_args(act(1, 2, "say nonsense")))
    assert outcome.status is Status.FINISHED
    assert "run_failed" not in scene.kinds()
    assert caplog.text.count("dropped a line that is no message") == 3
    assert "rank 1 may not say run_failed: dropped" in caplog.text


def test_losing_the_launcher_fails_the_run(scene: Scene) -> None:
    class Killer(Seen):
        def __call__(self, message: dict[str, Any]) -> None:
            super().__call__(message)
            if message["kind"] == Kind.RANK_READY and self.stops():
                os.kill(scene.engine._process.pid, signal.SIGKILL)
                self.stop_at = {}

    outcome = scene.play("until_stopped", ALL_WAIT, Killer({Kind.RANK_READY: WORLD}), lambda: 0)
    assert outcome.status is Status.FAILED
    assert outcome.error == "the launcher for fake_trainer died (by SIGKILL): it wrote nothing"
    assert scene.kinds()[-1] == "run_failed"


def test_an_entry_that_is_not_there_fails_the_run(scene: Scene) -> None:
    outcome = scene.play("no_such", {})
    assert outcome.status is Status.FAILED
    assert outcome.error is not None and "no_such" in outcome.error


def test_an_error_of_the_view_leaves_no_worker(scene: Scene) -> None:
    class Broken(Seen):
        def __call__(self, message: dict[str, Any]) -> None:
            if message["kind"] == Kind.RANK_READY:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scene.play("until_stopped", ALL_WAIT, Broken())
    scene.engine.close()
    assert scene.all_gone()


def test_ctrl_c_and_sigterm_are_counted_and_given_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals() as stops:
        stops.only_count()
        assert stops.count() == 0
        for number, expected in ((signal.SIGINT, 1), (signal.SIGTERM, 2)):
            os.kill(os.getpid(), number)
            begun_s = time.monotonic()
            while stops.count() < expected and time.monotonic() - begun_s < 10:
                pass
            assert stops.count() == expected
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_before_a_run_a_request_is_raised_and_never_lost() -> None:
    with StopSignals() as stops:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(10_000_000):  # until the interpreter looks
                pass
        # As if it had been dropped: the run does not begin.
        with pytest.raises(KeyboardInterrupt):
            stops.only_count()
