"""Nodes of a real Slurm that die or cannot be seen under a run that has agents."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from slurm_bench import Bench, Size

from meshwright.base.errors import ConfigError
from meshwright.control.words import NodeAction, NodeStatus, RunState


@pytest.mark.parametrize("dead", ["n01", "n04"])
def test_with_a_spare_the_run_goes_on_without_a_requeue(
    bench: Bench, seconds: Callable[[str, float], None], dead: str
) -> None:
    """n01 is where the batch step of Slurm runs: no node is special."""
    size = Size(steps=10**6, dp=2, tp=2, pp=2, spares=2, every=10**6, redundancy="auto")
    order = bench.start(bench.order(size, nodes=[0, 1, 2, 3]))
    bench.until(order, lambda _: len(bench.events(order, "spare_ready")) == 2)
    bench.until_step(order, 6)
    bench.lab.kill_node(dead)
    killed_s, done = time.monotonic(), bench.steps(order)[-1]
    bench.until(order, lambda _: bench.events(order, "takeover_done"))
    bench.until_step(order, done + 5)
    seconds("from the death of a node to five more steps", time.monotonic() - killed_s)
    bench.until(order, lambda _: bench.lab.states()[dead].startswith("drained"))
    [job] = [job for job in bench.lab.jobs() if job["id"] == str(order.handle["slurm_job"])]
    assert job["state"] == "RUNNING"
    assert bench.look(order).state is RunState.RUNNING
    steps = bench.steps(order)
    assert steps == list(range(1, steps[-1] + 1)), "no step is lost, none done twice"
    assert len(bench.events(order, "run_started")) == 1


def test_a_node_that_is_cut_off_is_unknown_and_its_rank_is_fenced(apart: Bench) -> None:
    """Cases 8 and 22: nobody takes it out of service; the run's own leases end its rank there, and
    a spare has taken its place by then. Once it is back, it is as any other."""
    size = Size(steps=10**6, dp=4, spares=1, every=10**6, redundancy="auto", stall_s=6.0)
    order = apart.start(apart.order(size, nodes=[0, 1, 2]))
    apart.until(order, lambda _: apart.events(order, "spare_ready"))
    apart.until_step(order, 6)
    apart.lab.cut("n02")
    apart.until(order, lambda _: apart.events(order, "takeover_done"))
    done = apart.steps(order)[-1]
    apart.until(order, lambda _: apart.node(1).status is NodeStatus.UNKNOWN)
    apart.until_step(order, done + 5)
    apart.lab.wait(lambda: apart.lab.stopped("n02"), "its rank was not fenced")
    assert apart.look(order).state is RunState.RUNNING
    apart.lab.heal("n02")
    apart.until(order, lambda _: apart.node(1).status is NodeStatus.RUNNING)
    apart.until_step(order, apart.steps(order)[-1] + 5)
    steps = apart.steps(order)
    assert steps == list(range(1, steps[-1] + 1))
    assert len(apart.events(order, "takeover_done")) == len(apart.events(order, "run_started")) == 1


def test_a_run_on_a_node_that_is_cut_off_is_not_started_elsewhere(apart: Bench) -> None:
    """It has no redundancy: as long as it may live, nothing is done; once Slurm has ended it there,
    it is started again, once."""
    order = apart.start(apart.order(Size(steps=10**6, dp=1), nodes=[0]))
    apart.until_step(order, 6)
    apart.lab.cut("n01")
    report = apart.until(order, RunState.UNKNOWN)
    apart.lab.wait(lambda: apart.lab.states()["n01"] == "down*", "Slurm does not give it up")
    assert "n01 cannot be seen" in report.message
    seen = apart.steps(order)[-1]
    apart.until_step(order, seen + 50)
    apart.lab.heal("n01")
    apart.until(order, RunState.LOST, never=(RunState.FAILED,))
    assert len(apart.events(order, "run_started")) == 1
    second = apart.again(order, nodes=[1])
    apart.until(second, RunState.RUNNING)
    assert len(apart.events(order, "run_started")) == 2


def test_nobody_resumes_what_somebody_else_has_drained(bench: Bench) -> None:
    """Case 14: each intent has one owner."""

    def act(action: NodeAction) -> None:
        list(bench.engine.act(bench.cluster, 0, action))

    words = ("scontrol", "update", "nodename=n01", "state=drain", "reason=fan broken")
    bench.lab.ask(*words)
    with pytest.raises(ConfigError, match="was taken out of service by root: 'fan broken'"):
        act(NodeAction.RESUME)
    act(NodeAction.DRAIN)
    assert "fan broken" in bench.lab.ask("sinfo", "-h", "-n", "n01", "-o", "%E")
    bench.lab.mend()
    act(NodeAction.DRAIN)
    bench.lab.wait(lambda: bench.node(0).status is NodeStatus.DRAINED, "it was not drained")
    act(NodeAction.RESUME)
    bench.lab.wait(lambda: bench.node(0).status is NodeStatus.RUNNING, "it was not resumed")


def test_a_cluster_is_deployed_and_its_conductor_may_die(bench: Bench) -> None:
    """The self-test sees all nodes; a run that has lost its conductor gets another."""
    steps = list(bench.engine.deploy(bench.cluster))
    assert [step.phase for step in steps][-1] == "ready"
    assert [step.progress for step in steps] == sorted(step.progress for step in steps)
    assert {"compute", "memory", "bandwidth"} <= {step.phase for step in steps if step.figures}
    order = bench.start(bench.order(Size(steps=10**6, redundancy="auto"), nodes=[0, 1]))
    bench.until_step(order, 6)
    bench.kill_conductor(order)
    bench.until(order, lambda _: len(bench.events(order, "run_started")) == 2)
    bench.until_step(order, bench.steps(order)[-1] + 5)
    bench.engine.stop(bench.cluster, order, hard=False)
    bench.until(order, RunState.STOPPED)
    bench.lab.wait(lambda: bench.lab.states()["n02"] == "idle", "the nodes are not free again")
