"""What follows from what can be seen of a run under Slurm; and what Slurm's commands write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.control.engines.slurm_decide import (
    MOST_SUBMITS,
    Act,
    Answer,
    Begin,
    End,
    Evidence,
    NodeEvidence,
    begin,
    judge,
)
from meshwright.control.engines.slurm_words import (
    SlurmJob,
    expand,
    gres_name,
    parse_jobs,
    parse_nodes,
)
from meshwright.control.words import NodeStatus, RunState


def job(state: str = "RUNNING", attempt: int = 1, number: int = 7, reason: str = "") -> SlurmJob:
    return SlurmJob(number, state, ("n1",), "mw-c-j", f"attempt={attempt}", reason)


def node(name: str = "n1", **said: Any) -> NodeEvidence:
    return NodeEvidence(
        **{"name": name, "begun": True, "held": True, "answer": Answer.YES, "chips": 4, **said}
    )


DEAD: dict[str, Any] = {"held": False, "answer": Answer.REFUSED}
RUNS = Evidence(
    survives=True,
    waits=False,
    ranks=4,
    heard=True,
    submits=1,
    slurm=job(),
    begun=True,
    held=True,
    ended=False,
    stop=False,
    ready=True,
    end=End.NONE,
    error="",
    nodes=(node("n1"), node("n2")),
)


def seen(**said: Any) -> Evidence:
    return replace(RUNS, **said)


def test_a_dead_node_of_a_run_that_goes_on_is_taken_out_and_no_more() -> None:
    judged = judge(seen(nodes=(node("n1"), node("n2", **DEAD))))
    assert (judged.state, judged.act, judged.dead) == (RunState.RUNNING, Act.NOTHING, ("n2",))


def test_a_run_that_would_wait_for_chips_for_ever_is_set_aside() -> None:
    lacks = {"ranks": 5, "nodes": (node("n1"), node("n2", **DEAD))}
    assert judge(seen(waits=True, **lacks)).act is Act.SET_ASIDE
    assert judge(seen(waits=False, **lacks)).act is Act.NOTHING
    enough = {**lacks, "ranks": 4}
    assert judge(seen(waits=True, **enough)).act is Act.NOTHING


def test_a_run_on_one_node_that_is_dead_is_lost_and_on_one_that_is_silent_unknown() -> None:
    one = seen(survives=False, nodes=(node(answer=Answer.SILENT),))
    assert judge(one).state is RunState.UNKNOWN
    judged = judge(seen(survives=False, held=False, nodes=(node(**DEAD),)))
    assert (judged.state, judged.act, judged.message) == (
        RunState.LOST,
        Act.SET_ASIDE,
        "n1 is lost",
    )


def test_a_lost_conductor_is_replaced_as_long_as_agents_live() -> None:
    assert judge(seen(held=False)).act is Act.CONDUCT
    gone = seen(held=False, nodes=(node(held=False), node("n2", held=False)))
    assert (judge(gone).state, judge(gone).act) == (RunState.LOST, Act.SET_ASIDE)


def test_a_job_that_slurm_forgot_is_submitted_again_but_not_for_ever() -> None:
    fresh = seen(begun=False, held=False, slurm=None, nodes=(node(begun=False, held=False),))
    assert judge(fresh).act is Act.SUBMIT
    assert judge(replace(fresh, heard=False)).act is Act.NOTHING
    assert judge(replace(fresh, submits=MOST_SUBMITS)).state is RunState.FAILED
    assert judge(replace(fresh, slurm=job("PENDING", reason="BeginTime"))).act is Act.RELEASE
    assert judge(replace(fresh, stop=True)).state is RunState.STOPPED


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ({"end": End.FINISHED}, RunState.FINISHED),
        ({"end": End.INTERRUPTED, "stop": True}, RunState.STOPPED),
        ({"end": End.INTERRUPTED}, RunState.LOST),  # preempted
        ({"end": End.FAILED, "error": "loss is NaN"}, RunState.FAILED),
        ({"end": End.FAILED, "nodes": (node(**DEAD),)}, RunState.LOST),
    ],
)
def test_what_a_run_that_has_ended_is(said: dict[str, Any], state: RunState) -> None:
    assert judge(seen(held=False, ended=True, **said)).state is state


NODES = st.builds(
    NodeEvidence,
    st.sampled_from(["n1", "n2"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(Answer),
    st.just(4),
)
STATES = ["PENDING", "RUNNING", "COMPLETING", "FAILED", "NODE_FAIL", "COMPLETED"]
ALL = st.builds(
    Evidence,
    survives=st.booleans(),
    waits=st.booleans(),
    ranks=st.just(4),
    heard=st.booleans(),
    submits=st.integers(0, 6),
    slurm=st.one_of(st.none(), st.builds(job, st.sampled_from(STATES))),
    begun=st.booleans(),
    held=st.booleans(),
    ended=st.booleans(),
    stop=st.booleans(),
    ready=st.booleans(),
    end=st.sampled_from(End),
    error=st.just(""),
    nodes=st.lists(NODES, min_size=1, max_size=3).map(tuple),
)


@given(ALL)
@settings(deadline=None)
def test_nothing_that_may_live_is_started_twice(found: Evidence) -> None:
    """Case 8 for its whole kind: silence takes no node out; what lives is neither submitted nor
    conducted again."""
    judged = judge(found)
    refused = {one.name for one in found.nodes if one.answer is Answer.REFUSED and not one.held}
    assert set(judged.dead) <= refused
    if found.held:
        assert judged.act is not Act.CONDUCT
        assert judged.act is not Act.SUBMIT or not any(one.begun for one in found.nodes)
    if found.begun and not found.survives:
        assert judged.act is not Act.SUBMIT


def test_how_an_attempt_begins() -> None:
    assert begin([], 1).how is Begin.SUBMIT
    assert begin([job("COMPLETED")], 1).how is Begin.SUBMIT
    assert begin([job()], 1).how is Begin.FOUND
    again = begin([job(attempt=1)], 2)
    assert (again.how, again.job) == (Begin.AGAIN, job(attempt=1))
    two = begin([job("PENDING", number=8), job("RUNNING", number=9)], 1)
    assert (two.job and two.job.id, two.surplus) == (9, (8,))


def test_what_sinfo_writes() -> None:
    text = (
        "n10|drained|10.0.0.10|16|gpu:h100:8(S:0)|root|meshwright: n10 was lost | twice\n"
        "n2|idle*|10.0.0.2|8|(null)|Unknown|none\nn2|idle*|10.0.0.2|8|(null)|Unknown|none\n"
    )
    second, tenth = parse_nodes(text, "n2    |17002   \nn10   |17010 \n")
    assert (second.name, second.port, second.status) == ("n2", 17002, NodeStatus.UNKNOWN)
    assert (second.gres, second.reason, second.ours) == ("", "", False)
    assert (tenth.port, tenth.status, tenth.ours) == (17010, NodeStatus.DRAINED, True)
    assert tenth.reason == "meshwright: n10 was lost | twice"
    assert gres_name(tenth.gres) == "gpu"


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("idle", NodeStatus.RUNNING),
        ("mixed-", NodeStatus.RUNNING),
        ("down", NodeStatus.FAILED),
        ("down*", NodeStatus.UNKNOWN),
        ("drained*", NodeStatus.DRAINED),
        ("draining", NodeStatus.DRAINING),
        ("idle@", NodeStatus.REBOOTING),
        ("unknown", NodeStatus.UNKNOWN),
        ("something_new", NodeStatus.UNKNOWN),
    ],
)
def test_states_of_nodes(state: str, status: NodeStatus) -> None:
    [found] = parse_nodes(f"n1|{state}|a|1|(null)|root|none", "")
    assert found.status is status


def test_what_squeue_writes() -> None:
    text = (
        "12|PENDING||mw-c1-j1|attempt=2|job requeued in held state\n3_4|RUNNING|n1|x|(null)|None\n"
    )
    [found] = parse_jobs(text)
    assert (found.id, found.nodes, found.attempt, found.waiting) == (12, (), 2, True)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("n1", ("n1",)),
        ("n[01-03,07],m1", ("n01", "n02", "n03", "n07", "m1")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("n[9-11]x", ("n9x", "n10x", "n11x")),
    ],
)
def test_lists_of_hosts(text: str, names: tuple[str, ...]) -> None:
    assert expand(text) == names
