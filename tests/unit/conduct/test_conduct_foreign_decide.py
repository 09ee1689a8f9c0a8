"""One incident is one decision, and every order of events comes to an end."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.conduct.foreign_decide import (
    Action,
    Cause,
    Ended,
    Event,
    Job,
    Reached,
    Result,
    Rules,
    Send,
    Stage,
    Start,
    StopAsked,
    Stuck,
    Tick,
    Trouble,
    begin,
    decide,
    wait_s,
)

RULES = Rules(world=3, max_restarts=5, grace_s=2.0, stop_s=9.0, kill_s=4.0, long_life_s=100.0)
HANG = Cause(Trouble.HANG, 1, "no progress")


def good(rank: int) -> Ended:
    return Ended(rank, 0, None)


def raised(rank: int) -> Ended:
    return Ended(rank, 1, None)


def killed(rank: int, number: int = signal.SIGKILL) -> Ended:
    return Ended(rank, None, number)


def play(job: Job, *events: tuple[float, Event]) -> tuple[Job, list[Action]]:
    actions: list[Action] = []
    for now_s, event in events:
        job, more = decide(job, event, now_s)
        actions += more
    return job, actions


def fresh(rules: Rules = RULES) -> Job:
    job, actions = begin(rules, 0.0)
    assert actions == (Start(),)
    return job


def fail(
    job: Job, now_s: float, rank: int = 1, step: int | None = None
) -> tuple[Job, list[Action]]:
    """One incarnation that ends by an exception of `rank`."""
    told = [(now_s, Reached(step))] if step is not None else []
    ends = [(now_s, killed(other, signal.SIGTERM)) for other in range(3) if other != rank]
    return play(job, *told, (now_s, raised(rank)), *ends)


def test_all_return() -> None:
    job, actions = play(fresh(), (1.0, good(1)), (5.0, good(0)), (99.0, good(2)))
    assert (job.stage, job.result, actions) == (Stage.OVER, Result.FINISHED, [])


def test_a_dead_rank_ends_all_others_at_once_and_all_start_again() -> None:
    job, actions = play(fresh(), (1.0, killed(1)))
    assert actions == [Send(signal.SIGTERM, frozenset({0, 2}))]
    job, actions = play(job, (1.1, killed(0, signal.SIGTERM)), (1.2, killed(2, signal.SIGTERM)))
    assert actions == [Start()]
    assert (job.stage, job.alive, job.restarts) == (Stage.RUNNING, frozenset({0, 1, 2}), 1)
    assert job.causes == (Cause(Trouble.SIGNAL, 1, "SIGKILL"),)


def test_those_that_do_not_end_in_time_are_killed() -> None:
    job, actions = play(fresh(), (1.0, raised(1)), (1.1, raised(0)), (2.9, Tick()))
    assert actions == [Send(signal.SIGTERM, frozenset({0, 2}))]
    job, actions = play(job, (3.0, Tick()), (3.1, Tick()))
    assert actions == [Send(signal.SIGKILL, frozenset({2}))]
    job, actions = play(job, (3.2, killed(2)))
    assert actions == [Start()]


def test_what_cannot_be_killed_ends_the_job() -> None:
    job, _ = play(fresh(), (1.0, raised(1)), (1.1, raised(0)), (3.0, Tick()), (7.0, Tick()))
    assert (job.stage, job.result) == (Stage.OVER, Result.FAILED)
    assert job.reason == "the kernel does not let go of rank 2"


def test_a_signal_from_outside_is_the_cause_though_a_peer_failed_earlier() -> None:
    """A rank with much memory takes longer to go than its peers to notice."""
    job, _ = play(fresh(), (1.0, raised(0)), (1.01, killed(1)), (1.02, raised(2)))
    assert job.causes == (Cause(Trouble.SIGNAL, 1, "SIGKILL"),)
    job, _ = play(fresh(), (1.0, raised(0)), (1.01, killed(1, signal.SIGABRT)), (1.02, raised(2)))
    assert job.causes == (Cause(Trouble.EXIT, 0, "exit code 1"),)
    ours = killed(1), killed(2)  # after grace: by us
    job, _ = play(fresh(), (1.0, raised(0)), (3.0, Tick()), *((3.1, end) for end in ours))
    assert job.causes == (Cause(Trouble.EXIT, 0, "exit code 1"),)


def test_a_hung_rank_writes_its_stack_and_a_frozen_one_is_killed() -> None:
    _, actions = play(fresh(), (1.0, Stuck(HANG)))
    others = Send(signal.SIGTERM, frozenset({0, 2}))
    assert actions == [Send(signal.SIGABRT, frozenset({1})), others]
    _, actions = play(fresh(), (1.0, Stuck(Cause(Trouble.FROZEN, 1, "stopped"))))
    assert actions == [Send(signal.SIGKILL, frozenset({1})), others]
    _, actions = play(fresh(), (1.0, Stuck(Cause(Trouble.HANG, None, "no progress"))))
    assert actions == [Send(signal.SIGABRT, frozenset({0, 1, 2}))]


@pytest.mark.parametrize("seed", range(5))
def test_a_thousand_ranks_that_time_out_one_after_another_are_one_decision(seed: int) -> None:
    """Each would notice at another moment of two minutes; the first one decides for all. A third
    of them does not hear SIGTERM."""
    draw = random.Random(seed)
    job, actions = fresh(Rules(world=1000, grace_s=5.0)), list[Action]()
    timeouts = sorted((600.0 + draw.uniform(0, 120), rank) for rank in range(1000))
    for at_s, rank in timeouts:
        events: list[Event] = [Tick(), raised(rank)]
        for event in events[: 1 + (rank in job.alive)]:
            if job.restarts:  # what is to come is of the last incarnation
                break
            job, more = decide(job, event, at_s)
            actions += more
            for send in more:
                if isinstance(send, Send):
                    heard = [r for r in send.ranks if send.number == signal.SIGKILL or r % 3]
                    job, later = play(job, *((at_s, killed(r, send.number)) for r in heard))
                    actions += later
    sends = [action.number for action in actions if isinstance(action, Send)]
    assert sends == [signal.SIGTERM, signal.SIGKILL]
    assert actions.count(Start()) == 1
    assert (job.restarts, job.alive, len(job.causes)) == (1, frozenset(range(1000)), 1)


def test_the_third_failure_at_the_same_step_ends_the_job_with_its_cause() -> None:
    job, now_s = fresh(), 0.0
    for count in range(3):
        assert job.stage is Stage.RUNNING, count
        job, _ = fail(job, now_s := now_s + 10.0, step=5)
        job, _ = play(job, (now_s := now_s + 60.0, Tick()))
    assert (job.stage, job.result, job.restarts) == (Stage.OVER, Result.FAILED, 2)
    assert job.reason == "3 failures in a row without progress"
    assert job.cause == Cause(Trouble.EXIT, 1, "exit code 1")


def test_progress_is_a_higher_step_or_a_long_life() -> None:
    job, now_s = fresh(), 0.0
    for count in range(4):
        job, _ = fail(job, now_s := now_s + 1.0, step=count)
        job, _ = play(job, (now_s := now_s + 60.0, Tick()))
    assert (job.stage, job.restarts) == (Stage.RUNNING, 4)
    job, now_s = fresh(), 0.0
    for _ in range(4):
        job, _ = fail(job, now_s := now_s + RULES.long_life_s)
        job, _ = play(job, (now_s := now_s + 60.0, Tick()))
    assert (job.stage, job.restarts) == (Stage.RUNNING, 4)


def test_a_flapping_rank_uses_up_one_budget_and_waits_longer_each_time() -> None:
    """It makes a step each time, so that it is not useless: the budget ends it."""
    job, now_s, starts, waits = fresh(), 0.0, [], list[float]()
    for step in range(20):
        job, _ = fail(job, now_s := now_s + 1.0, step=step)
        if job.stage is Stage.WAITING:
            assert job.deadline_s is not None
            waits.append(job.deadline_s - now_s)
            job, more = play(job, (now_s := job.deadline_s, Tick()))
            starts += more
    assert (job.result, job.restarts) == (Result.FAILED, RULES.max_restarts)
    assert job.reason == "all 5 restarts are used up"
    assert waits == [1.0, 2.0, 4.0, 8.0]  # the first restart does not wait
    assert len(starts) == 4
    assert wait_s(100) == 60.0


def test_causes_are_counted_each_for_itself() -> None:
    job, _ = fail(fresh(), 1.0, rank=1, step=1)
    job, _ = fail(job, 2.0, rank=2, step=2)
    assert (job.stage, job.restarts) == (Stage.RUNNING, 2)  # neither had to wait


def test_a_stop_saves_and_a_second_one_kills() -> None:
    job, actions = play(fresh(), (1.0, StopAsked()), (9.9, Tick()))
    everyone = frozenset({0, 1, 2})
    assert actions == [Send(signal.SIGTERM, everyone)]
    _, actions = play(job, (10.0, Tick()))
    assert actions == [Send(signal.SIGKILL, everyone)]
    job, actions = play(job, (2.0, StopAsked()))
    assert actions == [Send(signal.SIGKILL, everyone)]
    job, _ = play(job, *((2.1, killed(rank)) for rank in range(3)))
    assert (job.result, job.restarts) == (Result.INTERRUPTED, 0)


def test_a_stop_while_waiting_or_ending_starts_nothing_more() -> None:
    job, _ = fail(fresh(), 1.0, step=1)
    job, _ = fail(job, 2.0, step=2)
    assert job.stage is Stage.WAITING
    assert play(job, (2.1, StopAsked()))[0].result is Result.INTERRUPTED
    job, _ = play(fresh(), (1.0, killed(1)), (1.1, StopAsked()))
    job, actions = play(job, (1.2, killed(0, 15)), (1.3, killed(2, 15)))
    assert (job.result, actions) == (Result.INTERRUPTED, [])


def test_ranks_that_all_return_though_asked_to_stop_have_finished() -> None:
    job, _ = play(fresh(), (1.0, StopAsked()), *((1.1, good(rank)) for rank in range(3)))
    assert job.result is Result.FINISHED


moments = st.lists(
    st.tuples(
        st.floats(0.0, 5.0),
        st.one_of(
            st.builds(good, st.integers(0, 2)),
            st.builds(raised, st.integers(0, 2)),
            st.builds(killed, st.integers(0, 2), st.sampled_from([6, 9, 11, 15])),
            st.builds(Reached, st.integers(0, 9)),
            st.just(StopAsked()),
            st.just(Stuck(HANG)),
            st.just(Tick()),
        ),
    ),
    max_size=60,
)


@given(moments)
@settings(deadline=None, max_examples=300)
def test_every_order_of_events_ends_and_no_wait_is_without_a_deadline(
    events: Sequence[tuple[float, Event]],
) -> None:
    """Also doubled and late ones: ranks end as often as the draw says, but once an incarnation."""
    job, now_s, starts = fresh(), 0.0, 1
    for gap_s, event in events:
        now_s += gap_s
        if isinstance(event, Ended) and event.rank not in job.alive:
            continue
        job, actions = decide(job, event, now_s)
        starts += actions.count(Start())
        _check(job, actions)
    for _ in range(200):  # from here on nothing happens but time, and what SIGKILL does
        if job.stage in (Stage.RUNNING, Stage.OVER):
            break
        now_s += 70.0
        job, actions = decide(job, Tick(), now_s)
        starts += actions.count(Start())
        _check(job, actions)
    assert job.stage in (Stage.RUNNING, Stage.OVER)
    assert starts <= 1 + RULES.max_restarts


def _check(job: Job, actions: Sequence[Action]) -> None:
    if job.stage not in (Stage.RUNNING, Stage.OVER):
        assert job.deadline_s is not None
    assert (job.stage is Stage.OVER) == (job.result is not None)
    if Start() in actions:
        assert job.alive == frozenset(range(3))
        assert not job.stop_asked
    for action in actions:
        assert not isinstance(action, Send) or action.ranks
