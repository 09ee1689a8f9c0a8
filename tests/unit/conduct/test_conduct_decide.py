"""Every order of events ends the run, and blames the rank that the others follow from."""

from __future__ import annotations

import signal

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.conduct.decide import (
    Action,
    Event,
    Patience,
    Phase,
    State,
    StopAsked,
    Tick,
    decide,
    first_cause,
)
from meshwright.conduct.protocol import Exit

PATIENCE = Patience(stop_s=10.0, settle_s=0.25, kill_s=0.75)


def good(rank: int) -> Exit:
    return Exit(rank, 100 + rank, code=0, signal=None, returned=True, ts=0.0)


def raised(rank: int, ts: float = 0.0) -> Exit:
    return Exit(rank, 100 + rank, code=1, signal=None, returned=False, ts=ts)


def killed(rank: int, number: int = 9, ts: float = 0.0) -> Exit:
    return Exit(rank, 100 + rank, code=None, signal=number, returned=False, ts=ts)


def play(world: int, *events: tuple[float, Event]) -> tuple[State, list[Action]]:
    state, actions = State(frozenset(range(world)), patience=PATIENCE), []
    for now_s, event in events:
        state, action = decide(state, event, now_s)
        actions += [action] if action else []
    return state, actions


def test_all_return() -> None:
    state, actions = play(2, (0.0, good(1)), (9.0, Tick()), (99.0, good(0)))
    assert (state.phase, actions, state.returned) == (Phase.OVER, [], frozenset({0, 1}))


def test_peers_of_a_dead_rank_may_settle_then_are_killed() -> None:
    events = (1.0, killed(1)), (1.2, raised(0)), (1.24, Tick())
    state, actions = play(3, *events)
    assert (state.phase, actions, len(state.deaths)) == (Phase.FAILING, [], 2)
    state, actions = play(3, *events, (1.25, Tick()))
    assert (state.phase, actions) == (Phase.KILLING, [Action.KILL])
    state, actions = play(3, *events, (1.25, Tick()), (1.3, killed(2)))
    assert (state.phase, actions) == (Phase.OVER, [Action.KILL])
    assert [death.rank for death in state.deaths] == [1, 0]  # the one we killed is no failure


def test_a_worker_that_cannot_be_killed_does_not_hold_the_run() -> None:
    state, _ = play(2, (0.0, killed(0)), (0.25, Tick()), (0.99, Tick()))
    assert state.phase is Phase.KILLING
    state, _ = play(2, (0.0, killed(0)), (0.25, Tick()), (1.0, Tick()))
    assert state.phase is Phase.OVER


def test_asked_once_terminates_asked_twice_kills() -> None:
    state, actions = play(2, (0.0, StopAsked()), (9.9, Tick()))
    assert (state.phase, actions) == (Phase.STOPPING, [Action.TERMINATE])
    _, actions = play(2, (0.0, StopAsked()), (1.0, StopAsked()), (1.0, StopAsked()))
    assert actions == [Action.TERMINATE, Action.KILL]
    _, actions = play(2, (0.0, StopAsked()), (10.0, Tick()))
    assert actions == [Action.TERMINATE, Action.KILL]


def test_a_signal_beats_exceptions_and_then_the_earliest() -> None:
    assert first_cause([]) is None
    assert first_cause([raised(0, 1.0), killed(5, 9, 1.1), raised(1, 0.5)]) == killed(5, 9, 1.1)
    assert first_cause([raised(0, 1.0), raised(4, 0.9), raised(2, 1.1)]) == raised(4, 0.9)
    assert first_cause([killed(1, 9, 2.0), killed(2, 11, 1.0)]) == killed(2, 11, 1.0)


def test_who_misses_a_peer_is_not_the_cause_though_it_ends_first() -> None:
    missing = Exit(0, 100, code=1, signal=None, returned=False, ts=1.0, peer_lost=True)
    assert first_cause([missing, raised(3, 2.0)]) == raised(3, 2.0)
    assert first_cause([missing]) == missing


def test_sigabrt_is_an_exception_of_another_language() -> None:
    abort = killed(1, signal.SIGABRT, 2.0)
    assert first_cause([abort, raised(0, 1.0)]) == raised(0, 1.0)
    assert first_cause([abort, raised(0, 3.0)]) == abort


_GAPS_S = st.integers(0, 32).map(lambda eighths: eighths / 8)  # exact, as the patience is


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[float, Event]]]:
    world = draw(st.integers(1, 5))
    ends: list[Event] = [
        draw(st.sampled_from([good, raised, killed]))(rank) for rank in range(world)
    ]
    extra: list[Event] = draw(st.lists(st.sampled_from([StopAsked(), Tick()]), max_size=8))
    events = draw(st.permutations(ends + extra))
    gaps = draw(st.lists(_GAPS_S, min_size=len(events), max_size=len(events)))
    return world, [(sum(gaps[: i + 1]), event) for i, event in enumerate(events)]


@settings(deadline=None)
@given(histories())
def test_any_history_ends_with_each_signal_sent_once(
    history: tuple[int, list[tuple[float, Event]]],
) -> None:
    world, events = history
    state, actions = play(world, *events)
    assert state.phase is Phase.OVER
    assert actions in ([], [Action.TERMINATE], [Action.KILL], [Action.TERMINATE, Action.KILL])
    asked = any(isinstance(event, StopAsked) for _, event in events)
    assert asked or Action.TERMINATE not in actions
    assert bool(state.deaths) or asked or len(state.returned) == world
    assert not state.returned & {death.rank for death in state.deaths}


@settings(deadline=None)
@given(histories(), st.integers(0, 12))
def test_after_a_death_the_run_ends_in_time_whatever_its_peers_do(
    history: tuple[int, list[tuple[float, Event]]], prefix: int
) -> None:
    world, events = history
    state, _ = play(world, *events[:prefix])
    if state.deaths and state.phase is not Phase.OVER:
        now_s = events[prefix - 1][0] if prefix <= len(events) else events[-1][0]
        for wait_s in (PATIENCE.settle_s, PATIENCE.settle_s + PATIENCE.kill_s):
            state, _ = decide(state, Tick(), now_s + wait_s)
        assert state.phase is Phase.OVER
