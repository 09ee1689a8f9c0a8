"""Runs on a real Slurm: started once, kept alive, started again."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_bench import Bench, Size

from meshwright.control.words import RunState


def test_a_job_on_two_nodes_runs_to_its_end(bench: Bench) -> None:
    size = Size(steps=8, redundancy="auto")
    order = bench.start(bench.order(size, nodes=[0, 1]))
    assert bench.start(order).handle == order.handle
    bench.until(order, RunState.FINISHED)
    assert bench.steps(order) == list(range(1, 9))
    assert len([job for job in bench.lab.jobs() if job["name"] == "mw-c1-j1"]) == 1
    bench.lab.wait(lambda: bench.lab.states()["n01"] == "idle", "the nodes are not free again")
    assert bench.new_engine().look(bench.cluster, order).state is RunState.FINISHED


def test_without_a_spare_it_runs_again_on_another_node(
    bench: Bench, seconds: Callable[[str, float], None]
) -> None:
    order = bench.start(bench.order(Size(steps=10**6), nodes=[0]))
    bench.until_step(order, 6)
    bench.lab.kill_node("n01")
    report = bench.until(order, RunState.LOST, never=(RunState.FAILED,))
    decided_s = time.monotonic()
    assert "n01 is lost" in report.message
    second = bench.again(order, nodes=[1])
    assert second.handle == order.handle, "it is the same job of Slurm"
    bench.lab.wait(lambda: _running_on(bench, second.handle["slurm_job"], "n02"), "not requeued")
    seconds("from the decision to a running job of Slurm", time.monotonic() - decided_s)
    bench.until(second, RunState.RUNNING)
    seconds("from the decision to all ranks ready", time.monotonic() - decided_s)
    assert bench.lab.states()["n01"].startswith("drained")
    assert "job j1" in bench.lab.ask("sinfo", "-h", "-n", "n01", "-o", "%E")


def _running_on(bench: Bench, job: int, node: str) -> bool:
    return any(
        (found["state"], found["nodes"]) == ("RUNNING", node)
        for found in bench.lab.jobs()
        if found["id"] == str(job)
    )


def test_jobs_that_slurmctld_forgets_run_once_all_the_same(bench: Bench) -> None:
    """It saves lazily: of what it accepted in its last seconds some is lost, and some comes back as
    waiting though its processes live, which are then ended (case 21)."""
    size = Size(steps=40, dp=1)
    orders = []
    for number, pause_s in enumerate((1.5, 0.3, 0.0)):
        order = bench.order(size, nodes=[number], name=f"j{number}")
        orders.append(bench.start(order))
        time.sleep(pause_s)
    bench.lab.kill_controller()
    assert {bench.look(order).state for order in orders} <= {RunState.STARTING, RunState.RUNNING}
    bench.lab.start_controller()
    bench.engine = bench.new_engine()  # a service that knows nothing, either
    for order in [bench.start(order) for order in orders]:
        while bench.until(order, lambda r: r.state.ended, never=()).state is RunState.LOST:
            order = bench.again(order, nodes=[3])  # Slurm drains one where it meets its own orphan
        assert bench.look(order).state is RunState.FINISHED
        assert bench.steps(order) == list(range(1, 41))
        assert len(bench.events(order, "run_started")) <= order.attempt
