"""The single decisions of a run that survives; `test_conduct_simulation.py` tries their orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from surviving_scene import make_job

from meshwright.base.errors import ConfigError
from meshwright.base.events import Kind
from meshwright.conduct.actions import (
    Action,
    Kill,
    KillAll,
    Launch,
    Record,
    Revive,
    SendTable,
    StopMembers,
)
from meshwright.conduct.lease import lapsed
from meshwright.conduct.members import (
    Condemned,
    Dying,
    Ended,
    Event,
    Executing,
    Heard,
    NodeGone,
    NodeUp,
    Ready,
    ResizeAsked,
    Stage,
    State,
    StopAsked,
    Tick,
    Up,
)
from meshwright.conduct.muster import Muster, adopted
from meshwright.conduct.places import Shapes, choose, grown, shapes, shrunk
from meshwright.conduct.protocol import Exit
from meshwright.conduct.quarantine import GivenUp, keep_out
from meshwright.conduct.shelf import other_layout
from meshwright.conduct.takeover import decide

MUSTER = Muster(make_job(4, cluster={"spares": 2, "nodes": 2}))


def killed(member: int, number: int = 9) -> Ended:
    end = Exit(-1, 100 + member, None, number, returned=False, ts=0.0, member=member)
    return Ended(member, end, "died by SIGKILL", 0.001)


def play(state: State, events: Sequence[Event], now_s: float) -> tuple[State, list[Action]]:
    """One event after the other."""
    done: list[Action] = []
    for event in events:
        state, actions = decide(state, [event], now_s)
        done += actions
    return state, done


def running(muster: Muster = MUSTER) -> State:
    """A run that is under way, all members of it up, and shadows dealt out."""
    state = muster.first_state(0.0, 0)
    nodes = [NodeUp(node, muster.slots(node), frozenset()) for node in range(muster.nodes)]
    state, _ = play(state, nodes, 0.0)
    for member in state.members:
        state, _ = play(state, [Up(member, (f"a{member}",)), Ready(member)], 1.0)
    for epoch in (1, 2):
        for member in state.table:
            state, _ = play(state, [Executing(member, epoch, 0)], 2.0)
    assert state.stage is Stage.RUNNING
    return state


def tables(actions: Sequence[Action]) -> list[SendTable]:
    return [action for action in actions if isinstance(action, SendTable)]


def deeds(actions: Sequence[Action]) -> list[Action]:
    """All but what is only written down."""
    return [action for action in actions if not isinstance(action, Record)]


def kinds(actions: Sequence[Action]) -> list[Kind]:
    return [action.kind for action in actions if isinstance(action, Record)]


def test_the_first_table_waits_for_all_ranks_and_for_no_spare() -> None:
    state = MUSTER.first_state(0.0, 0)
    state, actions = play(state, [Up(member, ("a",)) for member in (3, 1, 0)], 1.0)
    assert not tables(actions)
    state, actions = play(state, [Up(2, ("a",))], 1.0)
    assert tables(actions) == [SendTable(1, (0, 1, 2, 3), ())]


def test_a_loss_is_made_good_before_anything_is_written_down() -> None:
    state, actions = play(running(), [killed(1)], 10.0)
    assert actions[0] == SendTable(2, (0, 4, 2, 3), (1,))  # 0 and 2 are twins of 1, on both nodes
    assert kinds(actions) == [Kind.RANK_LOST]
    state, actions = play(state, [Executing(m, 2, 6) for m in (0, 2, 3)], 10.1)
    assert not actions
    state, actions = play(state, [Executing(4, 2, 6)], 10.2)
    assert kinds(actions) == [Kind.TAKEOVER_DONE]
    assert state.stage is Stage.RUNNING


def test_what_comes_twice_changes_nothing() -> None:
    once, _ = play(running(), [killed(1)], 10.0)
    for event in (killed(1), Up(4, ("a4",)), Ready(4), Executing(1, 1, 0)):
        again, actions = play(once, [event], 10.0)
        assert (again, actions) == (once, [])


def test_what_belongs_to_an_older_epoch_does_not_count() -> None:
    state, _ = play(running(), [killed(1)], 10.0)
    state, _ = play(state, [Executing(m, 1, 6) for m in (0, 4, 2, 3)], 10.1)
    assert state.stage is Stage.TAKING_OVER


def test_ranks_move_away_from_a_node_that_holds_all_copies() -> None:
    muster = Muster(make_job(2, cluster={"spares": 4, "nodes": 2}))
    state, actions = play(running(muster), [NodeGone(0, "its agent died")], 10.0)
    state, _ = play(state, [Executing(m, 2, 6) for m in state.table], 10.1)
    assert {state.members[member].node for member in state.table} == {1}
    state, _ = play(state, [NodeUp(0, 3, frozenset(), fresh=True)], 11.0)
    state, actions = play(state, [Tick()], 11.2)
    [launch, *_] = [action for action in actions if isinstance(action, Launch)]
    state, _ = play(state, [Up(launch.member, ("a",))], 12.0)
    state, actions = play(state, [Ready(launch.member)], 12.1)
    [table] = tables(actions)
    assert (table.moved, table.lost) == ((1,), (1,))
    assert table.members[1] == launch.member
    assert Kind.ADVICE in kinds(actions)
    state, actions = play(state, [Executing(m, 3, 8) for m in state.table], 12.2)
    assert Kind.TAKEOVER_DONE not in kinds(actions) and state.stage is Stage.RUNNING
    assert not tables(play(state, [Tick()], 14.0)[1])


def test_a_second_loss_meanwhile_leads_to_one_more_table_with_both_lost() -> None:
    state, _ = play(running(), [killed(1)], 10.0)
    state, actions = play(state, [killed(2)], 10.01)
    [table] = tables(actions)
    assert (table.epoch, set(table.lost)) == (3, {1, 2})
    state, actions = play(state, [Executing(m, 3, 6) for m in table.members], 10.2)
    [done] = [a for a in actions if isinstance(a, Record)]
    assert (done.kind, done.fields["ranks"]) == (Kind.TAKEOVER_DONE, [1, 2])


def test_losses_that_come_together_share_a_table() -> None:
    _, actions = decide(running(), [killed(1), killed(2)], 10.0)
    [table] = tables(actions)
    assert set(table.lost) == {1, 2}


def test_who_is_frozen_is_killed_before_its_rank_is_given_away() -> None:
    state, actions = play(running(), [Condemned(1, "frozen", 0.2)], 10.0)
    assert actions == [Kill(1)]
    waiting, actions = play(state, [Tick()], 10.9)
    assert not tables(actions)
    _, actions = play(waiting, [killed(1)], 10.95)
    assert tables(actions)
    _, actions = play(waiting, [Tick()], 11.0)  # it cannot be killed: its epoch keeps it out
    assert tables(actions)


def test_who_is_dying_is_replaced_before_it_is_buried() -> None:
    state, actions = play(running(), [Dying(1, 0.001)], 10.0)
    assert actions == [SendTable(2, (0, 4, 2, 3), (1,))]
    state, actions = play(state, [killed(1)], 10.05)
    [lost] = [action for action in actions if isinstance(action, Record)]
    assert (lost.kind, lost.fields["rank"]) == (Kind.RANK_LOST, 1)
    assert lost.fields["cause"] == "died by SIGKILL" and not tables(actions)
    state, actions = play(state, [Executing(m, 2, 6) for m in state.table], 10.1)
    [done] = [action for action in actions if isinstance(action, Record)]
    assert done.fields["cause"] == "died by SIGKILL"
    assert state.deaths == ()


def test_a_burial_after_the_takeover_is_still_written_down() -> None:
    state, _ = play(running(), [Dying(1, 0.001)], 10.0)
    state, _ = play(state, [Executing(m, 2, 6) for m in state.table], 10.05)
    state, actions = play(state, [killed(1)], 10.1)
    assert kinds(actions) == [Kind.RANK_LOST] and not deeds(actions)
    assert state.deaths == () and state.stage is Stage.RUNNING


def test_a_dead_agent_takes_its_members_along() -> None:
    muster = Muster(make_job(4, cluster={"spares": 4, "nodes": 2}))
    state, actions = play(running(muster), [NodeGone(0, "its agent died")], 10.0)
    assert deeds(actions) == [SendTable(2, (4, 6, 2, 3), (0, 1)), Revive(0)]
    assert all(state.members[member].node == 1 for member in state.table)


def test_a_lease_counts_only_where_nobody_gets_on() -> None:
    state = running()
    end_s = 2.0 + state.limits.lease_conductor_s
    state, actions = play(state, [Heard(0, True), Tick()], end_s + 1.0)
    assert kinds(actions) == [Kind.ALERT] and not tables(actions)
    state, actions = play(state, [Heard(0, False), Tick()], end_s + 2.0)
    assert not actions  # told once
    later_s = end_s + 1.0 + state.limits.lease_conductor_s
    _, actions = play(state, [Heard(0, False), Tick()], later_s + 0.1)
    assert tables(actions)


def test_a_conductor_that_was_kept_from_running_blames_nobody_for_what_it_has_not_heard() -> None:
    state, _ = play(running(), [Heard(0, progressed=True), Heard(1, progressed=True)], 10.0)
    waited_s = 3 * state.limits.lease_conductor_s
    later, actions = play(state, [Heard(1, progressed=True), Tick(10.01)], 10.0 + waited_s)
    assert not actions and later.nodes[0].alive
    later, actions = play(state, [Heard(1, progressed=True), Tick()], 10.0 + waited_s)
    assert kinds(actions) == [Kind.ALERT]


def test_the_lease_rule() -> None:
    assert not lapsed(10.0, renewed_s=0.0, progress_s=5.0, lease_s=5.0)
    assert not lapsed(10.0, renewed_s=5.0, progress_s=0.0, lease_s=5.0)
    assert lapsed(10.1, renewed_s=5.0, progress_s=5.0, lease_s=5.0)


def test_a_spare_is_started_again_once_the_run_is_calm() -> None:
    state, _ = play(running(), [killed(1)], 10.0)
    state, actions = play(state, [Executing(m, 2, 6) for m in state.table], 10.2)
    assert not [a for a in actions if isinstance(a, Launch)]
    _, actions = play(state, [Tick()], 11.1)
    assert deeds(actions) == [Launch(0, 6)]


def test_too_many_takeovers_end_the_run() -> None:
    muster = Muster(make_job(4, cluster={"spares": 2, "nodes": 2}, resilience={"max_takeovers": 1}))
    state, _ = play(running(muster), [killed(1)], 10.0)
    state, actions = play(state, [killed(2)], 10.1)
    assert state.failure == "1 takeovers in an hour (resilience.max_takeovers = 1)"
    assert not tables(actions)


def test_stopping_goes_on_taking_over_and_ends_in_time() -> None:
    state, actions = play(running(), [StopAsked()], 10.0)
    assert actions == [StopMembers((0, 1, 2, 3, 4, 5))]
    state, actions = play(state, [killed(1)], 10.1)
    assert tables(actions) and StopMembers(tables(actions)[0].members) in actions
    _, actions = play(state, [Tick()], 10.0 + state.limits.stop_s)
    assert deeds(actions) == [KillAll()]


def test_nobody_is_replaced_once_somebody_is_done() -> None:
    done = Ended(0, Exit(-1, 100, 0, None, returned=True, ts=0.0, member=0), "returned")
    state, actions = play(running(), [done, killed(1)], 10.0)
    assert (state.stage, tables(actions)) == (Stage.ENDING, [])


def test_growing_starts_members_and_waits_for_them() -> None:
    state = running()
    state = replace(state, rules=replace(state.rules, spares=0))
    state, _ = play(state, [killed(4), killed(5)], 9.0)
    state, actions = play(state, [ResizeAsked(6)], 10.0)
    assert actions == [Launch(0, 6), Launch(1, 7)]
    state, actions = play(state, [Tick(), Up(6, ("a",)), Up(7, ("a",)), Ready(6)], 10.1)
    assert not deeds(actions)
    _, actions = play(state, [Ready(7)], 10.2)
    assert tables(actions) == [SendTable(2, (0, 1, 2, 3, 6, 7), (4, 5), 6)]


def test_nobody_is_started_where_there_is_no_chip() -> None:
    state = running(Muster(make_job(4)))
    assert state.chips == 4
    assert not deeds(play(state, [ResizeAsked(6), Tick()], 10.0)[1])


SMALL = Muster(make_job(4, cluster={"nodes": 2}))


def shrunken() -> State:
    """Four replicas on two nodes, of which the second is lost."""
    state, actions = play(running(SMALL), [NodeGone(1, "its agent died")], 10.0)
    assert [table.dp_replicate for table in tables(actions)] == [2]
    state, _ = play(state, [Executing(m, state.epoch, 6) for m in state.table], 10.1)
    return state


def test_a_run_that_shrank_grows_back_once_its_node_is_there_again() -> None:
    state, actions = play(shrunken(), [Tick()], 12.0)
    assert not deeds(actions)
    state, actions = play(state, [NodeUp(1, 2, frozenset(), fresh=True)], 13.0)
    assert deeds(actions) == [Launch(1, 4), Launch(1, 5)]
    assert kinds(actions) == [Kind.NODE_BACK]
    state, actions = play(state, [Up(4, ("a",)), Up(5, ("a",)), Ready(4), Tick()], 14.0)
    assert not deeds(actions)
    state, actions = play(state, [Ready(5)], 15.0)
    [table] = tables(actions)
    assert (table.members, table.lost, table.dp_replicate) == ((0, 1, 4, 5), (2, 3), 4)
    state, actions = play(state, [Executing(m, state.epoch, 9) for m in state.table], 15.1)
    [resized] = [action for action in actions if isinstance(action, Record)]
    assert (resized.fields["before"], resized.fields["after"]) == (2, 4)
    assert state.goal is None


def test_it_grows_as_far_as_there_are_chips() -> None:
    state = keep_out(shrunken(), GivenUp({9: 1}, frozenset()), 0.0)  # one chip of node 1 errs
    state, actions = play(state, [NodeUp(1, 2, frozenset(), fresh=True)], 13.0)
    [launch] = deeds(actions)
    assert isinstance(launch, Launch)
    state, _ = play(state, [Up(launch.member, ("a",))], 14.0)
    state, actions = play(state, [Ready(launch.member)], 14.0)
    assert [table.dp_replicate for table in tables(actions)] == [3]
    assert state.goal == 4


def test_members_that_do_not_live_are_not_started_for_ever() -> None:
    state, _ = play(shrunken(), [NodeUp(1, 2, frozenset(), fresh=True)], 13.0)
    for second in range(200):
        ends = [killed(number) for number in state.living() if number > 1]
        state, _ = play(state, [Heard(0, True), Heard(1, True), *ends], 14.0 + second)
    assert len(state.launches) == state.rules.max_takeovers + 4


def test_a_run_that_was_asked_to_be_small_stays_so() -> None:
    state, _ = play(shrunken(), [ResizeAsked(2), NodeUp(1, 2, frozenset(), fresh=True)], 13.0)
    assert not deeds(play(state, [Tick()], 15.0)[1])
    assert state.goal is None


def test_places() -> None:
    shape = Shapes(stages=2, inner=2, sizes=(1, 2, 4))
    assert [shape.place(rank, 2) for rank in (0, 3, 4, 7)] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 1, 1),
    ]
    assert shape.twins(5, 8) == [7]
    assert shrunk(range(8), {0, 1, 6, 7}, shape) == (1, (0, 1, 6, 7))
    assert shrunk(range(8), {0, 6, 7}, shape) is None  # nobody holds the place of rank 1
    table = grown(range(8), 4, range(10, 18), shape)
    assert table == (0, 1, 2, 3, 10, 12, 11, 13, 4, 5, 6, 7, 14, 16, 15, 17)
    assert grown(range(8), 4, range(10, 17), shape) is None
    assert grown(range(8), 1, (), shape) == (0, 1, 4, 5)


def test_a_spare_stands_apart_from_the_twins_of_the_lost_rank() -> None:
    shape = Shapes(stages=1, inner=1, sizes=(2,))
    nodes = {0: 0, 1: 1, 2: 1, 3: 0}
    assert choose([0], [0, 1], [2, 3], nodes, shape) == {0: 3}
    assert choose([1], [0, 1], [3, 2], nodes, shape) == {1: 2}
    assert choose([0], [0, 1], [2], nodes, shape) == {0: 2}
    assert choose([0, 1], [0, 1], [2], nodes, shape) is None


def test_sizes_are_those_that_the_job_runs_with() -> None:
    job = make_job(4, data={"global_batch": 24}, layout={"micro_batch": 2})
    assert shapes(job).sizes == (1, 2, 3, 4, 6, 12)
    assert shapes(job).replicas(4) == 4


def test_twins_may_shrink_to_one_that_has_none() -> None:
    assert 1 in shapes(make_job(2, resilience={"redundancy": "twin"})).sizes


def test_twins_start_on_different_nodes() -> None:
    job = make_job(8, layout={"dp_replicate": 2, "tp": 2, "pp": 2}, cluster={"nodes": 2})
    muster = Muster(job)
    for rank in range(8):
        for twin in muster.shapes.twins(rank, 8):
            assert muster.home_of(rank) != muster.home_of(twin)


def test_a_new_conductor_knows_what_the_agents_know() -> None:
    table = {
        "epoch": 3,
        "members": {"0": 0, "1": 4, "2": 2, "3": 3},
        "homes": {"0": 0, "4": 1, "2": 1, "3": 1},
        "lost": [1],
    }

    def member(number: int, at: list[int] | None) -> dict[str, object]:
        return {"member": number, "addresses": ["a"], "ready": True, "executing": at}

    old = {**table, "epoch": 2}
    hellos = {
        0: {"table": old, "launched": [0, 1], "members": [member(0, [3, 7]), member(1, [2, 5])]},
        1: {"table": table, "launched": [4, 2], "members": [member(4, [2, 7]), member(2, None)]},
    }
    state, newest = adopted(MUSTER.first_state(0.0, 1000), hellos, 7)
    assert newest == table
    assert (state.stage, state.epoch, state.table) == (Stage.TAKING_OVER, 3, (0, 4, 2, 3))
    assert state.executing == {0: 7}
    holds = {number: member.holds for number, member in state.members.items()}
    # 1 has no rank any more, 4 is lost and has not said that it runs, 3 was not heard of.
    assert holds == {0: True, 1: False, 4: False, 2: True, 3: True}
    after, actions = decide(replace(state, nodes=running().nodes), [killed(2)], 1.0)
    assert after.epoch == 1001 and tables(actions)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"spares": 5}, "a job takes 0 to 4 for each 64; set spares to 4 or less"),
        ({"nodes": 9}, "nodes = 9 for 8 chips: each has at least one; set nodes to 8 or less"),
    ],
)
def test_what_a_cluster_cannot_have(section: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_job(8, cluster=section)
    make_job(8, cluster={"spares": 4, "nodes": 8})


def shadowed(nodes: int = 2) -> State:
    """A run with two spares that shadow its four ranks."""
    cluster = {"spares": 2, "nodes": nodes}
    state = running(Muster(make_job(4, cluster=cluster, resilience={"redundancy": "shadow"})))
    assert state.epoch == 2 and state.table == (0, 1, 2, 3)  # the first had no ready spares
    return state


def test_spares_shadow_the_ranks_of_other_nodes() -> None:
    state = shadowed()
    node = {number: member.node for number, member in state.members.items()}
    assert sorted(state.shadows) == [0, 1, 2, 3] and set(state.shadows.values()) == {4, 5}
    assert all(node[spare] != node[rank] for rank, spare in state.shadows.items())
    assert not play(state, [Tick()], 2.5)[1]


def test_a_lost_rank_goes_to_its_shadow_and_the_other_takes_on_the_rest() -> None:
    state = shadowed()
    spare = state.shadows[3]
    other = ({4, 5} - {spare}).pop()
    state, actions = play(state, [killed(3)], 10.0)
    [table] = tables(actions)
    assert table.members == (0, 1, 2, spare) and set(table.shadows.values()) == {other}
    assert Kind.ADVICE in kinds(actions)  # some rank has its shadow on its own node now


def test_a_shadow_that_dies_is_replaced_at_once_by_those_that_are_left() -> None:
    state = shadowed()
    state, actions = play(state, [killed(5)], 10.0)
    [table] = tables(actions)
    assert table.members == state.table == (0, 1, 2, 3)
    assert set(table.shadows.values()) == {4}
    kept = {rank for rank, member in shadowed().shadows.items() if member == 4}
    assert all(table.shadows[rank] == 4 for rank in kept)


def test_without_a_spare_the_ranks_keep_each_other_and_that_is_said() -> None:
    state, _ = play(shadowed(), [killed(5)], 10.0)
    state, _ = play(state, [Executing(m, 3, 6) for m in state.table], 10.1)
    state, actions = play(state, [killed(4)], 10.2)
    [table] = tables(actions)
    assert not table.shadows
    [said] = [a.fields["advice"] for a in actions if isinstance(a, Record)]
    assert said.startswith("no spare is left to shadow the ranks")


def test_the_last_rank_may_die_while_its_shadow_lives() -> None:
    cluster = {"spares": 1}
    state = running(Muster(make_job(1, cluster=cluster, resilience={"redundancy": "shadow"})))
    state, actions = play(state, [killed(0)], 10.0)
    assert [table.members for table in tables(actions)] == [(1,)]


def test_mirrors_that_end_up_on_one_node_are_spoken_of() -> None:
    cluster = {"ref": "local:4", "spares": 2, "nodes": 2}
    layout = {"dp_replicate": 1, "dp_shard": 4}
    resilience = {"redundancy": "mirror"}
    muster = Muster(make_job(4, cluster=cluster, layout=layout, resilience=resilience))
    state = running(muster)
    away = [member for member in state.table if state.members[member].node == 0]
    assert len(away) == 2
    spares = [m for m in (4, 5) if state.members[m].node == 1]
    state, actions = play(state, [killed(away[0]), killed(away[1])], 10.0)
    said = [a.fields["advice"] for a in actions if isinstance(a, Record) and "advice" in a.fields]
    on_one = {state.members[member].node for member in state.table} == {1}
    assert on_one == any("all ranks are on node 1" in line for line in said), spares


def test_another_layout_is_kept_as_it_can_be() -> None:
    muster = Muster(make_job(4, resilience={"redundancy": "twin"}))
    relayout, job = other_layout(muster, 4, {"dp_replicate": 1, "dp_shard": 4})
    assert (relayout.world, relayout.before, relayout.after) == (4, "dp4", "fsdp4")
    assert job.resilience.redundancy == "auto"
    with pytest.raises(ConfigError, match="'precision=fp16': takes dp_replicate"):
        other_layout(muster, 4, {"precision": "fp16"})
    with pytest.raises(ConfigError, match="the run goes on in it already"):
        other_layout(muster, 4, {"dp_replicate": 4})
