"""Runs that survive, over real agents and members without a trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from surviving_scene import Scene, make_job

from meshwright.base.events import Kind
from meshwright.conduct.conductor import Status

HERE = Path(__file__).parent


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    return Scene(tmp_path)


def test_a_run_without_faults(scene: Scene) -> None:
    outcome = scene.play(make_job(4))
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    assert scene.steps() == list(range(1, 41))
    assert not scene.events(Kind.TAKEOVER_DONE)


def test_a_killed_rank_is_taken_over_by_the_spare(scene: Scene) -> None:
    job = make_job(8, cluster={"spares": 1})
    outcome = scene.play(job, {"3": {"at": 7, "do": "SIGKILL"}})
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    [done] = scene.events(Kind.TAKEOVER_DONE)
    assert (done["ranks"], done["members"]) == ([3], {"3": 8})
    assert done["cause"] in ("died by SIGKILL", "died")  # found while it dies, or dead
    [lost] = scene.events(Kind.RANK_LOST)
    assert (lost["rank"], lost["member"], lost["signal"]) == (3, 3, "SIGKILL")
    assert scene.steps() == list(range(1, 41))


@pytest.mark.parametrize("do", ["SIGSEGV", "SIGSTOP", "raise", "hang"])
def test_whatever_befalls_a_rank_it_is_replaced(scene: Scene, do: str) -> None:
    stall_s = 30.0 if do in ("SIGSEGV", "raise") else 9.0  # a busy machine must not seem to hang
    job = make_job(4, cluster={"spares": 1}, resilience={"longest_stall_s": stall_s})
    outcome = scene.play(job, {"2": {"at": 7, "do": do}}, steps=60)
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    [done] = scene.events(Kind.TAKEOVER_DONE)
    assert (done["ranks"], done["members"]) == ([2], {"2": 4})
    causes = {"SIGSEGV": "died by SIGSEGV", "raise": "failed with exit code 1"}
    assert done["cause"] in (causes.get(do, done["cause"]), "died")
    hangs = [(event["rank"], event["phase"]) for event in scene.events(Kind.HANG)]
    assert hangs == {"SIGSTOP": [(2, "data")], "hang": [(2, "backward")]}.get(do, [])
    assert scene.steps() == list(range(1, 61))


def test_a_chip_that_errs_is_replaced_and_not_used_again(scene: Scene) -> None:
    job = make_job(4, cluster={"spares": 1})
    outcome = scene.play(job, {"2": {"at": 7, "do": "corrupt"}}, steps=300)
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    [done] = scene.events(Kind.TAKEOVER_DONE)
    assert (done["members"], done["cause"]) == ({"2": 4}, "its state changed")
    [given_up] = scene.events(Kind.QUARANTINED)
    assert (given_up["rank"], given_up["member"], given_up["node"]) == (2, 2, 0)
    # There are five chips, and one of them is not to be used: there is no room for a new spare.
    assert {event["member"] for event in scene.events(Kind.SPARE_READY)} == {4}


@pytest.mark.parametrize("slow", [True, False])
def test_a_rank_that_sleeps_is_named_and_nobody_because_cores_are_few(
    scene: Scene, slow: bool
) -> None:
    """Case 20, of a rank that uses no more of its core than others do."""
    rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        acts = {"2": {"at": 5, "do": "slow"}} if slow else {}
        outcome = scene.play(make_job(4), acts, steps=50, step_s=0.05)
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    named = scene.events(Kind.STRAGGLER)
    assert [event["rank"] for event in named] == ([2] if slow else [])
    if slow:  # by 5 %
        assert 1.03 < named[0]["busy_ratio"] < 1.08
        kinds = [(message["kind"], message.get("step", 0)) for message in scene.seen]
        before = kinds[: [kind for kind, _ in kinds].index(Kind.STRAGGLER)]
        assert max(step for kind, step in before if kind == Kind.METRICS) < 5 + 20
    assert not scene.events(Kind.HANG)


def test_what_twins_dispute_for_good_ends_the_run_and_says_how_to_go_on(scene: Scene) -> None:
    outcome = scene.play(make_job(4), {"2": {"at": 7, "do": "dispute"}})
    assert outcome.status is Status.FAILED
    assert outcome.error is not None
    assert outcome.error.startswith("step 7: its state changed, and it cannot be told which is ")
    assert outcome.error.endswith(f"last checkpoint: meshwright train {scene.rundir.path} --resume")


def test_two_that_die_together_and_one_of_the_spares(scene: Scene) -> None:
    job = make_job(6, cluster={"spares": 4})
    acts = {str(n): {"at": 9, "do": "SIGKILL"} for n in (1, 4)}
    outcome = scene.play(job, {**acts, "6": {"at": 12, "do": "SIGKILL"}}, steps=60)
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    ranks = [rank for done in scene.events(Kind.TAKEOVER_DONE) for rank in done["ranks"]]
    assert set(ranks) == {1, 4} and len(ranks) >= 3


def test_a_rank_that_is_lost_at_one_step_again_and_again_ends_the_run(scene: Scene) -> None:
    job = make_job(4, cluster={"spares": 4})
    acts = {str(n): {"at": 7, "do": "raise"} for n in (2, 4, 5, 6, 7)}
    outcome = scene.play(job, acts, step_s=0.05, steps=400)
    assert outcome.status is Status.FAILED
    assert outcome.error is not None
    assert outcome.error.startswith("rank 2 was lost 3 times at step ")
    assert "ValueError: bad value on member " in outcome.error
    assert outcome.error.endswith(".log")


def test_what_befalls_all_ranks_fails_the_run_with_its_cause(scene: Scene) -> None:
    acts = {"*": {"at": 7, "do": "raise"}}
    outcome = scene.play(make_job(4, cluster={"spares": 1}), acts)
    assert outcome.status is Status.FAILED
    assert outcome.error is not None and "ValueError: bad value on member" in outcome.error


def test_without_a_spare_the_run_shrinks(scene: Scene) -> None:
    outcome = scene.play(make_job(6), {"3": {"at": 7, "do": "SIGKILL"}}, steps=60)
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    [resized] = scene.events(Kind.RESIZED)
    assert (resized["before"], resized["after"]) == ("dp6", "dp4")  # 5 does not divide 48


def test_or_waits_for_a_new_member_on_the_free_chip(scene: Scene) -> None:
    job = make_job(4, resilience={"on_no_spare": "wait"})
    outcome = scene.play(job, {"3": {"at": 7, "do": "SIGKILL"}}, steps=200)
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    [done] = scene.events(Kind.TAKEOVER_DONE)
    assert done["members"] == {"3": 4}
    assert not scene.events(Kind.RESIZED)


def test_stopping_stops_spares_too(scene: Scene) -> None:
    scene.once(Kind.METRICS, lambda: setattr(scene, "stops", 1), step=5)
    outcome = scene.play(make_job(4, cluster={"spares": 2}), steps=10**6)
    assert (outcome.status, outcome.error) == (Status.INTERRUPTED, None)
    assert outcome.step >= 5
    assert scene.events(Kind.RUN_INTERRUPTED)


def test_a_member_lost_before_the_first_step_is_started_again(scene: Scene) -> None:
    killed: list[int] = []

    def kill() -> None:
        agent = scene.fleet.pid(0)
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        killed.append(int(children[0]))
        os.kill(killed[0], signal.SIGKILL)

    scene.once(Kind.SPARE_READY, kill)
    outcome = scene.play(make_job(6, cluster={"spares": 1}), late=5)
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)
    assert killed and not scene.events(Kind.TAKEOVER_DONE)
