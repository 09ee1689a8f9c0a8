"""Chips that err and nodes that are lost again and again are not used any more."""

from __future__ import annotations

import pytest
from surviving_scene import make_job
from test_conduct_takeover import MUSTER, deeds, killed, kinds, play, running, tables

from meshwright.base.events import Kind
from meshwright.conduct.actions import Kill, Launch, Record
from meshwright.conduct.members import (
    Corrupt,
    Disputed,
    Executing,
    NodeGone,
    NodeUp,
    Ready,
    Stage,
    State,
    Tick,
    Up,
)
from meshwright.conduct.muster import Muster
from meshwright.conduct.quarantine import GivenUp, given_up, keep_out

DIFFERS = "the states of ranks [0, 1, 2, 3], which hold the same, differ"


def test_a_chip_that_errs_is_given_up_and_named() -> None:
    state, actions = play(running(), [Corrupt(1, DIFFERS)], 10.0)
    assert deeds(actions) == [Kill(1)]
    [record] = [action for action in actions if isinstance(action, Record)]
    told = {"rank": 1, "member": 1, "node": 0, "step": 0, "cause": DIFFERS}
    assert (record.kind, record.fields) == (Kind.QUARANTINED, told)
    assert play(state, [Corrupt(1, DIFFERS)], 10.0) == (state, [])  # said twice
    state, actions = play(state, [killed(1)], 10.01)
    assert tables(actions)[0].members == (0, 4, 2, 3)
    [lost] = [a for a in actions if isinstance(a, Record) and a.kind == Kind.RANK_LOST]
    assert lost.fields["cause"] == DIFFERS


def test_a_spare_that_errs_is_given_up_too() -> None:
    state, actions = play(running(), [Corrupt(4, "it differs")], 10.0)
    assert deeds(actions) == [Kill(4)]
    [record] = [action for action in actions if isinstance(action, Record)]
    assert (record.fields["rank"], record.fields["member"]) == (None, 4)
    assert 4 not in play(state, [killed(1)], 10.1)[0].table


@pytest.mark.parametrize("errs", [True, False])
def test_no_member_is_started_in_the_place_of_a_chip_that_errs(errs: bool) -> None:
    """Node 0 has three places, for ranks 0 and 1 and a spare, node 1 as many: both are full."""
    events = [Corrupt(1, DIFFERS)] if errs else []
    state, _ = play(running(), [*events, killed(1)], 10.0)
    state, _ = play(state, [Executing(m, 2, 6) for m in state.table], 10.2)
    _, actions = play(state, [Tick()], 11.5)
    launched = [action for action in actions if isinstance(action, Launch)]
    assert launched == ([] if errs else [Launch(0, 6)])


def test_a_step_that_twins_dispute_is_done_again_by_the_same_members() -> None:
    state, actions = play(running(), [Disputed(1, "they differ", redo=True)], 10.0)
    assert [(table.members, table.lost) for table in tables(actions)] == [((0, 1, 2, 3), ())]
    again, actions = play(state, [Disputed(1, "they differ", redo=True)], 10.0)
    assert (again, actions) == (state, [])  # the other twin says so too
    state, actions = play(state, [Executing(m, 2, 6) for m in state.table], 10.1)
    assert (state.stage, actions) == (Stage.RUNNING, [])
    assert not state.takeovers


def test_a_dispute_among_losses_needs_one_table() -> None:
    state, _ = play(running(), [killed(1)], 10.0)
    state, actions = play(state, [Disputed(state.epoch, "they differ", redo=True)], 10.0)
    assert len(tables(actions)) == 1
    assert not state.disputed


def test_what_nothing_can_tell_ends_the_run() -> None:
    state, actions = play(running(), [Disputed(1, "they differ", redo=False)], 10.0)
    assert (state.stage, state.failure) == (Stage.ENDING, "they differ")
    assert not tables(actions)


def test_a_flapping_node_is_given_up_before_it_uses_up_all_takeovers() -> None:
    """Case 6: it is lost one second after each time that it holds ranks again."""
    muster = Muster(make_job(4, cluster={"spares": 4, "nodes": 2}))
    state, now_s, interrupted = running(muster), 10.0, 0
    for _ in range(30):
        state, actions = play(state, [NodeGone(0, "its agent died")], now_s)
        interrupted += len(tables(actions))
        state = _settled(state, now_s + 0.1)
        if state.nodes[0].banned:
            break
        state, more = _back(state, now_s + 1.0)
        interrupted += more
        now_s += 5.0
    assert state.nodes[0].banned
    assert state.stage is Stage.RUNNING
    assert {state.members[number].node for number in state.table} == {1}
    assert interrupted <= 2 * state.rules.max_flaps  # away from it, and back
    assert kinds(actions)[-1] == Kind.QUARANTINED
    rejoined, actions = play(state, [NodeUp(0, 4, frozenset({99}), fresh=True)], now_s + 1.0)
    assert (rejoined, actions) == (state, [Kill(99)])


def _settled(state: State, now_s: float) -> State:
    """All run again, one step later each second."""
    done = [Executing(m, state.epoch, int(now_s)) for m in state.table]
    return play(state, done, now_s)[0]


def _back(state: State, now_s: float) -> tuple[State, int]:
    """Node 0 is there again, with members that are ready."""
    state, _ = play(state, [NodeUp(0, 4, frozenset(), fresh=True)], now_s)
    state, actions = play(state, [Tick()], now_s + 1.1)
    moves = 0
    for launch in [action for action in actions if isinstance(action, Launch)]:
        state, _ = play(state, [Up(launch.member, ("a",))], now_s + 1.2)
        state, done = play(state, [Ready(launch.member)], now_s + 1.3)
        moves += len(tables(done))
        if tables(done):
            state = _settled(state, now_s + 1.4)
    return state, moves


def test_a_later_conductor_reads_which_chips_were_given_up() -> None:
    def said(member: int | None, node: int = 0) -> dict[str, object]:
        return {"kind": Kind.QUARANTINED, "member": member, "node": node}

    start = {"kind": Kind.RUN_STARTED}
    adopted = {**start, "adopted": True}
    found = given_up([start, said(3), said(None, 1), adopted, said(5)])
    assert found == GivenUp({3: 0, 5: 0}, frozenset({1}))
    assert given_up([start, said(3), said(None, 1), start, said(4)]) == GivenUp({4: 0}, frozenset())


def test_a_later_conductor_uses_neither_a_banned_node_nor_a_chip_that_errs() -> None:
    state = keep_out(running(), GivenUp({9: 1}, frozenset({0})), 0.0)
    after, actions = play(state, [NodeUp(0, 3, frozenset({0, 1, 5}), fresh=True)], 10.0)
    assert actions == [Kill(0), Kill(1), Kill(5)]
    assert not after.nodes[0].alive
    assert state.chips == 2  # node 1 has three
    for known, started in ((running(), 1), (state, 0)):
        _, actions = play(known, [killed(4)], 10.0)
        assert len([action for action in actions if isinstance(action, Launch)]) == started


@pytest.mark.parametrize(("ts", "banned"), [(1000.0, True), (900.0, False)], ids=["", "long ago"])
def test_losses_that_an_earlier_conductor_saw_count_towards_a_ban(ts: float, banned: bool) -> None:
    """Four came back, each of two conductors having seen two; the fifth, seen now, is the last."""
    start, adopted = {"kind": Kind.RUN_STARTED}, {"kind": Kind.RUN_STARTED, "adopted": True}
    back = {"kind": Kind.NODE_BACK, "node": 0}
    seen = [{**back, "ts": ts}, {**back, "ts": 3000.0}]
    found = given_up([start, *seen, *seen, start, *seen, adopted, *seen])
    assert found.gone_ts == {0: (ts, 3000.0, ts, 3000.0)}
    # The conductor's clock showed 10 s at 4550 of the wall clock: 1000 was 3550 s before.
    state, _ = play(keep_out(running(), found, 10.0 - 4550.0), [NodeGone(0, "it died")], 10.0)
    assert state.nodes[0].banned == banned
    assert not state.nodes[1].gone_s


def test_more_takeovers_allow_more_losses_of_a_node() -> None:
    assert MUSTER.first_state(0.0, 0).rules.max_flaps == 5
    few = Muster(make_job(4, resilience={"max_takeovers": 2}))
    assert few.first_state(0.0, 0).rules.max_flaps == 3
