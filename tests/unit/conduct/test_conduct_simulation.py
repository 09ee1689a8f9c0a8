"""Thousands of schedules of faults against the real decisions, and that each check can fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from surviving_scene import make_job

from meshwright.conduct.actions import Action, SendTable
from meshwright.conduct.members import Ended, Event, NodeGone, Stage, State, Unlinked
from meshwright.conduct.muster import Muster
from meshwright.conduct.simulated import Line
from meshwright.conduct.simulation import Simulation, Verdict, ViolationError
from meshwright.conduct.takeover import decide

FAULTS = ("kill", "kill", "freeze", "agent", "agent unseen", "cut", "partition", "crash")
SPARES = Muster(make_job(6, cluster={"spares": 2, "nodes": 3}))
AMPLE = Muster(make_job(6, cluster={"spares": 4, "nodes": 3}))
SHRINKS = Muster(make_job(6, cluster={"nodes": 3}))
WAITS = Muster(make_job(4, cluster={"nodes": 2}, resilience={"on_no_spare": "wait"}))
SCHEDULES = 400  # of each kind


def play(muster: Muster, seed: int, faults: tuple[str, ...] = FAULTS, **options: Any) -> Verdict:
    """The run of one seed, with one to four faults."""
    return schedule(muster, seed, faults, **options).play(limit_s=4000.0)


def schedule(muster: Muster, seed: int, faults: tuple[str, ...], **options: Any) -> Simulation:
    """The run before it begins."""
    world = Simulation(seed, muster, steps=24, **options)
    dice = random.Random(-seed - 1)
    time_s = 0.0
    for _ in range(dice.randint(1, 4)):
        time_s += dice.uniform(0.2, 6.0)
        world.clock.after(time_s, lambda: strike(world, dice, dice.choice(faults)))
    return world


def strike(world: Simulation, dice: random.Random, fault: str) -> None:
    """One fault, now."""
    node, member = dice.randrange(len(world.agents)), dice.randrange(10)
    match fault:
        case "kill":
            world.kill(member)
        case "freeze":
            world.freeze(member)
        case "agent":
            world.kill_agent(node, seen=True)
        case "agent unseen":
            world.kill_agent(node, seen=False)
        case "cut" | "partition":
            world.cut(node, dice.choice((0.1, 5.0, 30.0)), data=fault == "partition")
        case "relayout" if world.conductor is not None:
            wanted = dice.choice(({"tp": 2, "dp_replicate": 2}, {"dp_replicate": 6, "tp": 1}))
            world.conductor.ask_layout({**wanted, "dp_shard": dice.choice((1, 2))})
        case "crash" if world.conductor is not None:  # a run has one at a time
            world.fire()
            world.clock.after(dice.uniform(0.1, 10.0), world.hire)


@pytest.mark.parametrize(
    ("muster", "share"),
    [
        pytest.param(SPARES, 0.98, id="spares"),
        pytest.param(SHRINKS, 0.96, id="shrinks"),
        pytest.param(WAITS, 0.85, id="waits"),  # of two nodes, both are often lost
    ],
)
def test_every_schedule_ends_and_breaks_no_rule(muster: Muster, share: float) -> None:
    finished = 0
    for seed in range(SCHEDULES):
        end = play(muster, seed)
        assert end.stage is Stage.OVER
        assert (end.failure is None) == (end.step == 24), (seed, end)
        finished += end.failure is None
    assert finished > share * SCHEDULES


def test_changes_of_the_layout_amid_faults() -> None:
    relaid = 0
    for seed in range(SCHEDULES):
        faults = ("relayout", "relayout", "relayout", "kill", "freeze", "agent", "cut", "crash")
        world = schedule(AMPLE, seed, faults)
        end = world.play(limit_s=4000.0)
        assert (end.failure is None) == (end.step == 24), (seed, end)
        relaid += world.relayouts
    assert relaid > SCHEDULES / 4


def test_dealing_out_shadows_ends_and_breaks_no_rule_either() -> None:
    kind = {"redundancy": "shadow"}
    muster = Muster(make_job(6, cluster={"spares": 2, "nodes": 3}, resilience=kind))
    ends = [play(muster, seed) for seed in range(SCHEDULES // 4)]
    assert all(end.stage is Stage.OVER for end in ends)
    assert sum(end.failure is None for end in ends) > 0.96 * len(ends)


@pytest.mark.parametrize("cut_s", [30.0, 120.0, 600.0])
def test_a_cut_control_link_restarts_nobody_and_is_told_once(cut_s: float) -> None:
    world = Simulation(1, SPARES, steps=2000)
    world.run_until(10.0)
    world.cut(1, cut_s, data=False)
    world.run_until(20.0 + cut_s)
    end = world.verdict()
    assert (end.restarts, end.replaced, end.alerts) == (0, [], 1)
    assert end.step > 2 * cut_s  # two steps a second, all the while


@pytest.mark.parametrize("cut_s", [30.0, 120.0, 600.0])
def test_with_the_data_link_cut_too_there_is_one_recovery(cut_s: float) -> None:
    short = {"longest_stall_s": 12.0}  # so is the lease, until steps are measured
    muster = Muster(make_job(6, cluster={"spares": 4, "nodes": 3}, resilience=short))
    world = Simulation(2, muster, steps=2000)
    world.run_until(10.0)
    old = [m for m in world.agents[1].members.values() if m.rank >= 0]
    world.cut(1, cut_s, data=True)
    world.run_until(30.0 + cut_s)
    end = world.verdict()
    assert sorted(end.replaced) == [member.number for member in old] == [2, 3]
    assert end.takeovers == 1
    assert not any(member.alive for member in old)
    assert world.step > 10 + cut_s  # it stood still for one lease


def test_ranks_that_were_stopped_for_want_of_a_lease_go_on_if_nobody_has_replaced_them() -> None:
    world = Simulation(2, AMPLE, steps=2000)
    world.run_until(10.0)
    world.cut(1, AMPLE.limits.lease_agent_s + 5.0, data=True)
    world.run_until(12.0 + AMPLE.limits.lease_agent_s)
    assert world.agents[1].stopped
    step = world.step
    world.run_until(30.0 + AMPLE.limits.lease_agent_s)
    assert world.step > step + 10
    assert (world.verdict().replaced, world.takeovers) == ([], 0)


def test_case_17_one_fault_among_many_ranks_is_one_takeover() -> None:
    """However late anybody hears of it."""
    many = Muster(make_job(48, cluster={"spares": 2, "nodes": 8}))
    for seed in range(5):
        world = Simulation(seed, many, steps=24)
        world.clock.after(8.0, partial(world.kill, 17))
        end = world.play(limit_s=4000.0)
        assert (end.step, end.takeovers, end.replaced) == (24, 1, [17])


def broken(muster: Muster, message: str, faults: tuple[str, ...], **options: Any) -> bool:
    """Whether some schedule breaks the rule that `message` names."""
    for seed in range(100):
        try:
            play(muster, seed, faults, **options)
        except ViolationError as error:
            if message in str(error):
                return True
    return False


def test_replacing_without_evidence_is_caught() -> None:
    def hasty(state: State, events: Sequence[Event], now_s: float) -> tuple[State, list[Action]]:
        events = [
            NodeGone(event.node, "its line was cut") if isinstance(event, Unlinked) else event
            for event in events
        ]
        return decide(state, events, now_s)

    assert broken(SPARES, "without evidence", ("cut",), decide=hasty)


def crash_amid_a_table(seed: int, **options: Any) -> Verdict:
    """A conductor that crashes while a table is under way, and a node that its heir cannot see."""
    world = Simulation(seed, SPARES, steps=40, **options)
    world.run_until(10.0)
    world.kill(2)
    world.run_until(10.0 + random.Random(seed).uniform(0.0, 0.3))
    world.fire()
    world.cut(2, 8.0, data=False)
    world.clock.after(0.1, world.hire)
    return world.play(limit_s=4000.0)


def test_a_crash_amid_a_table_does_no_harm() -> None:
    assert all(crash_amid_a_table(seed).failure is None for seed in range(100))


@pytest.mark.parametrize("harm", ["drop", "delay", "double"])
def test_no_control_message_is_one_that_all_depends_on(
    monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """Case 18: each message of a run with a loss in turn. One is dropped only with its line."""
    send = Line.send
    for chosen in range(120):
        count = 0

        def send_badly(
            line: Line, way: str, deliver: Callable[[], None], chosen: int = chosen
        ) -> None:
            nonlocal count
            count += 1
            if count - 1 != chosen:
                send(line, way, deliver)
            elif harm == "drop":
                line.open = False
            elif harm == "delay":
                line._next_s[way] = line.clock.now_s + 5.0  # and all that follow: in order
                send(line, way, deliver)
            else:
                send(line, way, deliver)
                send(line, way, deliver)

        monkeypatch.setattr(Line, "send", send_badly)
        world = Simulation(7, SPARES, steps=16)
        world.run_until(4.0)
        world.kill(2)
        end = world.play(limit_s=400.0)
        assert (end.failure, end.step, end.restarts) == (None, 16, 0), (chosen, end)
        assert count > chosen


def test_giving_an_epoch_twice_is_caught() -> None:
    with pytest.raises(ViolationError, match="two members hold rank 2 in epoch 2"):
        for seed in range(100):
            crash_amid_a_table(seed, epochs_of_one=0)


def test_never_looking_at_leases_is_caught() -> None:
    def patient(state: State, events: Sequence[Event], now_s: float) -> tuple[State, list[Action]]:
        forever = replace(state.limits, lease_conductor_s=1e9)
        return decide(replace(state, limits=forever), events, now_s)

    assert broken(SPARES, "no end", ("agent unseen",), decide=patient)


def test_losing_a_death_is_caught() -> None:
    def deaf(state: State, events: Sequence[Event], now_s: float) -> tuple[State, list[Action]]:
        events = [e for e in events if not (isinstance(e, Ended) and e.exit.failed)]
        return decide(state, events, now_s)

    assert broken(SPARES, "no end", ("kill",), decide=deaf)


def test_forgetting_that_state_grows_old_is_caught() -> None:
    def forgetful(
        state: State, events: Sequence[Event], now_s: float
    ) -> tuple[State, list[Action]]:
        after, actions = decide(state, events, now_s)
        tables = [a for a in actions if isinstance(a, SendTable)]
        kept = [replace(a, lost=()) if a in tables else a for a in actions]
        return after, kept

    assert broken(SPARES, "is not lost", ("kill",), decide=forgetful)


def test_replacing_twice_is_caught() -> None:
    def again(state: State, events: Sequence[Event], now_s: float) -> tuple[State, list[Action]]:
        after, actions = decide(state, events, now_s)
        tables = [a for a in actions if isinstance(a, SendTable)]
        if tables and state.epoch > 1:
            after = replace(after, table=state.table)
        return after, actions

    assert broken(SPARES, "replaced twice", ("kill",), decide=again)
