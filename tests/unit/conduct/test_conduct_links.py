"""Links that are slow or cut: who is named, and which ranks get out of the way."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from surviving_scene import Scene, make_job

from meshwright.base.errors import InputError
from meshwright.base.events import Kind
from meshwright.conduct.actions import Action, Kill, Record, SendTable
from meshwright.conduct.around import around, behind, beside
from meshwright.conduct.conductor import Status
from meshwright.conduct.fleet import Fleet
from meshwright.conduct.hosts import own_hosts
from meshwright.conduct.links import REPORTS, LinkLog, SlowLink
from meshwright.conduct.members import Executing, Heard, LinksSeen, Ready, Stage, State, Tick, Up
from meshwright.conduct.muster import Muster
from meshwright.conduct.reach import (
    ANSWER_S,
    TRY_S,
    Probe,
    Reached,
    Tries,
    network_places,
    unreached,
)
from meshwright.conduct.rundir import RunDir
from meshwright.conduct.simulation import Simulation, Verdict
from meshwright.conduct.takeover import decide

NODES = {member: member // 2 for member in range(8)}  # two on each of four nodes
QUIET: dict[str, Any] = {"cut": False, "answers": True, "lost": [], "host": "10.0.0.2"}


def tell(log: LinkLog, member: int, peer: int, small_s: float, bytes_per_s: float | None) -> None:
    log.see(
        member, [{**QUIET, "peer": peer, "small_s": small_s, "bytes_per_s": bytes_per_s}], NODES
    )


def measure(
    log: LinkLog,
    slow: Mapping[tuple[int, int], float],
    members: Sequence[int] = range(8),
    times: int = REPORTS,
    seed: int = 0,
) -> None:
    """Reports of all members; `slow` by nodes or, for a chip, by members."""
    dice = random.Random(seed)
    for _ in range(times):
        for a in members:
            for b in members:
                if NODES[a] != NODES[b]:
                    factor = slow.get((NODES[a], NODES[b]), 1.0) * slow.get((-1 - a, -1 - b), 1.0)
                    noise = dice.uniform(0.7, 1.5)
                    tell(log, a, b, 1e-3 * noise * factor, 1e9 / noise / factor)


def test_the_slow_link_is_named_with_how_slow_it_is() -> None:
    log = LinkLog()
    measure(log, {})
    assert log.slow() == ()
    measure(log, {(2, 1): 8.0})
    [link] = log.slow()
    assert link.nodes == (1, 2)
    assert 5 < link.times < 12
    measure(log, {})
    assert log.slow() == ()  # it has healed


def test_streams_of_one_member_alone_are_not_their_nodes_link() -> None:
    log = LinkLog()
    measure(log, {(-1 - a, -1 - 5): 50.0 for a in range(8)})
    assert log.slow() == ()


def test_one_bad_report_is_not_enough() -> None:
    log = LinkLog()
    measure(log, {})
    measure(log, {(0, 1): 9.0}, times=REPORTS // 2 - 1)
    assert log.slow() == ()


def test_a_single_link_is_compared_with_itself_before() -> None:
    log = LinkLog()
    measure(log, {}, members=range(4))
    assert log.slow() == ()
    measure(log, {(0, 1): 20.0, (1, 0): 20.0}, members=range(4))
    [link] = log.slow()
    assert link.nodes == (0, 1) and 10 < link.times < 40


def test_a_lost_path_is_told_once_and_a_cut_link_until_it_heals() -> None:
    log = LinkLog()
    lost = {**QUIET, "peer": 2, "small_s": None, "bytes_per_s": None, "lost": ["10.0.0.1"]}
    assert not log.lost_paths(0, [{**lost, "answers": False}], NODES)  # nor does another
    [path] = log.lost_paths(0, [{**lost, "lost": []}], NODES)
    assert str(path) == "node 0 reaches node 1 by 10.0.0.2: 10.0.0.1 does not answer"
    assert not log.lost_paths(1, [lost], NODES)
    log.see(0, [{**lost, "cut": True}], NODES)
    assert log.cut(range(8)) == {(0, 1)}
    assert log.cut([1, 2, 3]) == set()  # who said so is dead
    log.see(0, [{**lost, "lost": []}], NODES)
    assert log.cut(range(8)) == set()


def test_the_way_around() -> None:
    table, bad = [0, 1, 2, 3, 4, 5], [(0, 1), (0, 2)]
    assert behind(0, [1], bad) and not behind(1, [1, 2], bad)
    assert beside(table, NODES, bad) == [0, 1, 2]
    assert around(table, NODES, bad, [6, 7]) == {0: 6, 1: 7}
    assert around(table, NODES, [(0, 3)], []) == {}  # nobody needs it
    assert around(table, NODES, bad, [6]) is None
    assert around(table[:4], NODES, [(0, 1), (1, 3)], [6, 7]) == {2: 6, 3: 7}


AMPLE = Muster(make_job(6, cluster={"spares": 4, "nodes": 3}))
SCARCE = Muster(make_job(4, cluster={"nodes": 2}))


def running(muster: Muster) -> State:
    """All run, and spares are ready."""
    state = muster.first_state(0.0, 0)
    numbers = sorted(state.members)
    state, _ = decide(state, [Up(n, (f"a{n}",)) for n in numbers], 1.0)
    nodes = {n: replace(node, linked=True, heard_s=9.0) for n, node in state.nodes.items()}
    state, _ = decide(replace(state, nodes=nodes), [Ready(n) for n in numbers[muster.world :]], 2.0)
    return at_step(state, 5, 3.0)[0]


def at_step(state: State, step: int, now_s: float) -> tuple[State, list[Action]]:
    return decide(state, [Executing(n, state.epoch, step) for n in state.table], now_s)


def tables(actions: Sequence[Action]) -> list[SendTable]:
    return [action for action in actions if isinstance(action, SendTable)]


def said(actions: Sequence[Action]) -> list[Kind]:
    return [action.kind for action in actions if isinstance(action, Record)]


def slow(a: int, b: int) -> LinksSeen:
    return LinksSeen((SlowLink((a, b), 8.0, "small messages"),), frozenset())


def cut(*ends: tuple[int, int]) -> LinksSeen:
    return LinksSeen((), frozenset(ends))


def test_ranks_leave_a_slow_link_one_at_a_time() -> None:
    state, actions = decide(running(AMPLE), [slow(0, 1)], 9.0)
    assert said(actions) == [Kind.ALERT, Kind.ADVICE]
    [table] = tables(actions)
    assert (table.moved, table.lost) == ((0,), (0,))
    state, actions = at_step(state, 6, 9.1)
    assert not tables(actions)  # the copy of what has moved is not complete yet
    state, actions = decide(*_next(state, 7), 9.2)
    [table] = tables(actions)
    assert table.moved == (1,)
    assert {state.members[member].node for member in state.table} == {1, 2}
    state, _ = at_step(state, 8, 9.3)
    state, actions = decide(state, [slow(0, 1), Tick()], 9.9)
    assert not actions


def _next(state: State, step: int) -> tuple[State, list[Any]]:
    return state, [Executing(n, state.epoch, step) for n in state.table]


def test_without_spares_a_slow_link_is_told_of_once() -> None:
    state, actions = decide(running(SCARCE), [slow(0, 1)], 9.0)
    assert said(actions) == [Kind.ALERT, Kind.ADVICE]
    assert not tables(actions)
    assert not decide(state, [slow(0, 1)], 9.1)[1]
    state, actions = decide(state, [LinksSeen((), frozenset()), slow(0, 1)], 9.2)
    assert not actions


def test_all_ranks_of_a_node_that_is_cut_off_move_at_once() -> None:
    state, actions = decide(running(AMPLE), [cut((0, 1), (0, 2))], 9.0)
    assert not tables(actions)
    state, actions = decide(state, [Heard(1, True), Heard(2, True)], 9.1)
    assert not tables(actions)  # node 0 may be silent: its lease decides then
    state, actions = decide(state, [Heard(0, True)], 9.1)
    assert [action.nodes for action in actions if isinstance(action, Probe)] == [(0, 1, 2)]
    state, actions = decide(state, [Reached(0, 9.1, frozenset({1, 2}))], 9.2)
    assert not tables(actions)  # the others may know more
    answers = [Reached(1, 9.1, frozenset({0})), Reached(2, 9.1, frozenset({0}))]
    state, actions = decide(state, answers, 9.3)
    assert said(actions) == [Kind.RANK_LOST, Kind.RANK_LOST, Kind.ADVICE]
    [table] = tables(actions)
    assert table.moved == (0, 1)
    assert {state.members[member].node for member in state.table} == {1, 2}
    assert not any(isinstance(action, Kill) for action in actions)
    state, actions = at_step(state, 6, 9.4)
    assert not tables(actions) and state.stage is Stage.RUNNING
    assert said(actions) == [Kind.TAKEOVER_DONE]
    # Members behind the cut are no help.
    assert not set(state.table) & {n for n, m in state.members.items() if m.node == 0}


@pytest.mark.parametrize("away", [0, 1, 2])
def test_it_is_the_node_that_is_cut_off_whose_ranks_move(away: int) -> None:
    """Whichever link is told of first; and at last by what is known, if some do not answer."""
    other = (away + 1) % 3
    heard = [Heard(node, True) for node in range(3)]
    state, _ = decide(running(AMPLE), [cut((min(away, other), max(away, other)))], 9.0)
    state, actions = decide(state, heard, 9.1)
    assert [type(action) for action in actions] == [Probe]
    found = Reached((away + 2) % 3, 9.1, frozenset({away}))
    state, actions = decide(state, [found, Tick()], 9.3)
    assert not actions
    state, actions = decide(state, [*heard, Tick()], 9.1 + ANSWER_S)
    [table] = tables(actions)
    moved = {rank for rank in range(6) if AMPLE.home_of(rank) == away}
    assert set(table.moved) == moved
    state, actions = decide(state, [Reached(away, 9.1, frozenset({other}))], 10.2)  # late
    assert not actions


def test_agents_find_out_whom_they_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = listener.getsockname()
        tries = Tries(1.0, {0: [here], 1: [("127.0.0.1", 1)], 2: []}, 0.0)
        while (missing := tries.missing(0.0)) is None:
            pass
    assert not missing  # who refuses has been reached, and who has no address is not tried
    silent = Tries(1.0, {4: [("192.0.2.1", 9)]}, 0.0)
    assert silent.missing(TRY_S) == frozenset({4})
    assert network_places(("unix:@x", "tcp:10.0.0.1:7", "tcp:fd00::1:8")) == [
        ("10.0.0.1", 7),
        ("fd00::1", 8),
    ]
    assert unreached({0: frozenset({1}), 2: frozenset({1, 0})}) == {(0, 1), (1, 2), (0, 2)}


def test_a_node_that_stays_cut_off_is_lost_where_nobody_can_take_its_ranks() -> None:
    state, actions = decide(running(SCARCE), [cut((0, 1))], 9.0)
    assert said(actions) == [Kind.ALERT] and not tables(actions)
    limit_s = state.limits.longest_stall_s
    state, _ = decide(state, [Heard(0, True), Heard(1, True)], 9.0 + limit_s / 2)
    state, actions = decide(state, [Tick()], 9.1 + limit_s / 2)
    assert not [action for action in actions if isinstance(action, Kill)]
    state, actions = decide(state, [Tick()], 9.1 + limit_s)
    killed = {action.member for action in actions if isinstance(action, Kill)}
    assert {state.members[member].node for member in killed} == {0}


SCHEDULES = 100
FAULTS = ("kill", "slow", "cut paths", "cut paths", "cut", "agent")


def play(muster: Muster, seed: int) -> Verdict:
    """One to four faults, some of them of links."""
    world = Simulation(seed, muster, steps=24)
    dice = random.Random(-seed - 1)
    time_s = 0.0
    for _ in range(dice.randint(1, 4)):
        time_s += dice.uniform(0.2, 6.0)
        world.clock.after(time_s, lambda: strike(world, dice, dice.choice(FAULTS)))
    return world.play(limit_s=4000.0)


def strike(world: Simulation, dice: random.Random, fault: str) -> None:
    """One fault, now."""
    node, other = dice.sample(sorted(world.agents), 2)
    match fault:
        case "kill":
            world.kill(dice.randrange(10))
        case "slow":
            world.slow_link(node, other)
        case "cut paths":
            world.cut_paths(node, dice.choice((0.1, 5.0, 60.0)))
        case "cut":
            world.cut(node, dice.choice((0.1, 5.0, 30.0)), data=False)
        case "agent":
            world.kill_agent(node, seen=True)


@pytest.mark.parametrize("muster", [AMPLE, SCARCE], ids=["spares", "none"])
def test_every_schedule_of_bad_links_ends_and_breaks_no_rule(muster: Muster) -> None:
    finished = 0
    for seed in range(SCHEDULES):
        end = play(muster, seed)
        assert (end.failure is None) == (end.step == 24), (seed, end)
        finished += end.failure is None
    assert finished > 0.9 * SCHEDULES


def test_an_agent_tries_all_addresses_of_its_conductor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first address has nobody who listens."""
    opened = Fleet.open

    def deafen(fleet: Fleet, rundir: RunDir) -> None:
        opened(fleet, rundir)
        fleet._listeners.pop(0).close()

    monkeypatch.setattr(Fleet, "open", deafen)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("MESHWRIGHT_HOSTS", "127.0.0.2")
    scene = Scene(tmp_path)
    job = make_job(2, cluster={"nodes": 2}, resilience={"longest_stall_s": 1.0})
    outcome = scene.play(job, steps=5)
    assert (outcome.status, outcome.error) == (Status.FINISHED, None)


def test_addresses_of_this_machine() -> None:
    assert own_hosts({}) == ()
    assert own_hosts({"MESHWRIGHT_HOSTS": "127.0.0.1, 127.0.0.2"}) == ("127.0.0.1", "127.0.0.2")
    with pytest.raises(
        InputError, match=r"names '192\.0\.2\.7', which is no address of this machine"
    ):
        own_hosts({"MESHWRIGHT_HOSTS": "192.0.2.7"})
