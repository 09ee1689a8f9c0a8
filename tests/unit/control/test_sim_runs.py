"""Runs on a simulated cluster: what becomes of them, and what they write down."""

from __future__ import annotations

import json
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_scene import Scene, figure, kinds, lines

from meshwright.base.errors import RunError
from meshwright.base.events import Metrics
from meshwright.control.engines.engine import ClusterOrder
from meshwright.control.engines.simulation.logbook import Logbook
from meshwright.control.engines.simulation.telling import chosen
from meshwright.control.spec import ClusterSpec
from meshwright.control.words import FaultKind, NodeAction, NodeStatus, RunState
from meshwright.watch.history import read_run
from meshwright.watch.summary import summary

HANDED_OVER = ["hang", "rank_lost", "takeover_done"]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_run_goes_from_start_to_finish(scene: Scene) -> None:
    run = scene.run(steps=12)
    assert scene.engine.look(scene.order, run).state is RunState.STARTING
    scene.after(20.0)
    assert scene.engine.look(scene.order, run).state is RunState.RUNNING
    scene.after(100.0)
    assert scene.engine.look(scene.order, run).state is RunState.FINISHED
    metrics = lines(run, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 13))
    assert {one.name for one in fields(Metrics)} == metrics[0].keys()
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    events = lines(run, "events.jsonl")
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert all(event["simulated"] and event["run"] == "job" for event in events)
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    assert kinds(run)[0] == "run_started" and kinds(run)[-1] == "run_finished"
    assert [e["step"] for e in events if e["kind"] == "checkpoint_committed"] == [5, 10, 12]
    assert scene.engine.look(scene.order, replace(run, attempt=2)).state is RunState.ABSENT


def test_its_directory_reads_as_any_other(scene: Scene) -> None:
    run = scene.run(steps=12, spares=1, redundancy="auto")
    scene.after(20.0)
    scene.fault(FaultKind.CHIP_DEAD, 0, 3)
    scene.after(100.0)
    found = summary(read_run(run.run_dir))
    assert found["status"] == "finished" and found["step"] == 12
    assert found["takeovers"] == 1 and found["unreadable_lines"] == 0


def test_a_spare_takes_over(scene: Scene) -> None:
    run = scene.run(spares=1, redundancy="auto")
    scene.after(31.0)
    scene.fault(FaultKind.CHIP_DEAD, 0, 3)
    report = scene.after(60.0)
    found = [kind for kind in kinds(run) if kind != "checkpoint_committed"]
    assert found == ["run_started", *HANDED_OVER]
    done = next(e for e in lines(run, "events.jsonl") if e["kind"] == "takeover_done")
    assert done["ranks"] == [3] and done["lost_steps"] == 0
    assert 0 < done["detected_s"] < done["takeover_s"] < 2
    assert scene.engine.look(scene.order, run).state is RunState.RUNNING
    assert figure(report, "tensor_active")[16] > 0  # the spare works
    steps = [line["step"] for line in lines(run, "metrics.jsonl")]
    assert steps == list(range(1, steps[-1] + 1)) and steps[-1] > 25


def test_without_redundancy_a_lost_rank_ends_the_run(scene: Scene) -> None:
    run = scene.run(spares=1, steps=1000)
    scene.after(31.0)
    scene.fault(FaultKind.NODE_DOWN, 0)
    scene.after(5.0)
    found = scene.engine.look(scene.order, run)
    assert found.state is RunState.FAILED and "lost power" in found.message
    assert kinds(run)[-1] == "run_failed"
    lost = [event for event in lines(run, "events.jsonl") if event["kind"] == "rank_lost"]
    assert lost and all(event["signal"] for event in lost)


def test_without_a_spare_a_run_shrinks(scene: Scene) -> None:
    run = scene.run(redundancy="auto")
    before = figure(scene.after(60.0), "steps")[0]
    scene.fault(FaultKind.CHIP_DEAD, 0, 3)
    after = figure(scene.after(60.0), "steps")[0] - before
    assert kinds(run)[-3:] != HANDED_OVER and "resized" in kinds(run)
    resized = next(e for e in lines(run, "events.jsonl") if e["kind"] == "resized")
    assert (resized["before"], resized["after"]) == ("dp4xtp4", "dp2xtp4")
    assert 0 < after < 0.75 * before  # half as many chips do it all


def test_without_a_spare_a_run_waits_for_its_chip(scene: Scene) -> None:
    run = scene.run(redundancy="auto", on_no_spare="wait")
    scene.after(60.0)
    scene.fault(FaultKind.CHIP_DEAD, 0, 3)
    told = len(lines(run, "metrics.jsonl"))
    scene.after(60.0)
    assert "alert" in kinds(run) and "takeover_done" not in kinds(run)
    assert len(lines(run, "metrics.jsonl")) == told
    list(scene.engine.act(scene.order, 0, NodeAction.REPLACE))
    scene.after(60.0)
    assert "takeover_done" in kinds(run)
    assert len(lines(run, "metrics.jsonl")) > told


def test_a_state_that_nobody_holds_ends_the_run(scene: Scene) -> None:
    run = scene.run(redundancy="auto")
    scene.after(31.0)
    scene.fault(FaultKind.NODE_DOWN, 0)
    scene.after(5.0)
    found = scene.engine.look(scene.order, run)
    assert found.state is RunState.FAILED and "no smaller layout" in found.message


def test_a_chip_that_errs_is_found_by_its_twins_alone(tmp_path: Path) -> None:
    losses = []
    for redundancy, spares in (("auto", 1), ("none", 0)):
        folder = tmp_path / redundancy
        folder.mkdir()
        scene = Scene(folder)
        run = scene.run(redundancy=redundancy, spares=spares)
        scene.after(30.0)
        scene.fault(FaultKind.CHIP_CORRUPT, 0, 3)
        scene.after(90.0)
        found = [kind for kind in kinds(run) if kind != "checkpoint_committed"]
        caught = ["corrupt", "quarantined", "rank_lost", "takeover_done"]
        assert found == ["run_started", *(caught if spares else [])]
        losses.append(lines(run, "metrics.jsonl")[39]["loss"])
    assert losses[1] > losses[0] + 1.0


def test_a_slow_chip_slows_all_and_is_named(scene: Scene) -> None:
    run = scene.run()
    scene.after(60.0)
    first = lines(run, "metrics.jsonl")[-1]["step_time_s"]
    scene.fault(FaultKind.CHIP_SLOW, 0, 3, severity=0.5)
    scene.after(60.0)
    last = lines(run, "metrics.jsonl")[-1]["step_time_s"]
    assert 1.7 * first < last < 2.1 * first
    named = [e for e in lines(run, "events.jsonl") if e["kind"] == "straggler"]
    assert [event["rank"] for event in named] == [3]


def test_what_cannot_be_seen_goes_on(scene: Scene) -> None:
    run = scene.run()
    scene.after(30.0)
    told = (run.run_dir / "metrics.jsonl").read_bytes()
    scene.fault(FaultKind.NODE_UNREACHABLE, 0, seconds=300.0)
    report = scene.after(290.0)
    assert report.nodes[0].status is NodeStatus.UNKNOWN
    assert scene.engine.look(scene.order, run).state is RunState.UNKNOWN
    assert (run.run_dir / "metrics.jsonl").read_bytes() == told
    with pytest.raises(RunError, match="node 0"):
        scene.engine.stop(scene.order, run, hard=False)
    scene.after(20.0)
    assert scene.engine.look(scene.order, run).state is RunState.RUNNING
    steps = [line["step"] for line in lines(run, "metrics.jsonl")]
    assert steps == list(range(1, steps[-1] + 1)) and steps[-1] > 100
    assert "rank_lost" not in kinds(run)


@pytest.mark.parametrize("hard", [False, True])
def test_a_run_stops_and_a_later_attempt_goes_on(scene: Scene, hard: bool) -> None:
    run = scene.run()
    scene.after(36.0)
    scene.engine.stop(scene.order, run, hard)
    scene.engine.stop(scene.order, run, hard)
    scene.after(5.0)
    assert scene.engine.look(scene.order, run).state is RunState.STOPPED
    assert kinds(run)[-1] == "run_interrupted"
    last = lines(run, "events.jsonl")[-1]["step"]
    saved = [e["step"] for e in lines(run, "events.jsonl") if e["kind"] == "checkpoint_committed"]
    assert (saved[-1] == last) != hard
    again = scene.run(attempt=2)
    scene.after(30.0)
    begun = [e for e in lines(run, "events.jsonl") if e["kind"] == "run_started"]
    assert [one["resumed_from"] for one in begun] == [None, saved[-1]]
    assert lines(run, "events.jsonl")[-1]["incarnation"] == 2
    assert lines(run, "metrics.jsonl")[last]["step"] == saved[-1] + 1
    assert scene.engine.look(scene.order, again).state is RunState.RUNNING
    assert scene.engine.look(scene.order, run).state is RunState.STOPPED


def test_a_later_attempt_ends_an_earlier_one(scene: Scene) -> None:
    run = scene.run()
    scene.after(30.0)
    again = scene.run(attempt=2)
    scene.after(30.0)
    assert scene.engine.look(scene.order, run).state is RunState.STOPPED
    assert scene.engine.look(scene.order, again).state is RunState.RUNNING
    scene.engine.destroy(scene.order)
    assert scene.engine.look(scene.order, again).state is RunState.STOPPED


def test_the_service_may_forget_what_is_over(scene: Scene) -> None:
    run = scene.run(steps=30)
    scene.fault(FaultKind.CHIP_SLOW, 0, 3, 0.5, seconds=40.0)
    scene.after(200.0)
    assert scene.engine.look(scene.order, run).state is RunState.FINISHED
    before = scene.after(10.0)
    scene.order = replace(scene.order, runs=(), faults=())
    scene.crash()
    after = scene.after(0.0)
    assert before.sample is not None and after.sample is not None
    assert before.sample.tobytes() == after.sample.tobytes()


def _life(scene: Scene, crashes: bool, tear: bool = False) -> tuple[bytes, bytes]:
    """A run with a takeover, watched each second."""
    run = scene.run(spares=1, redundancy="auto", steps=40)
    for second in range(120):
        if second == 40:
            scene.fault(FaultKind.CHIP_DEAD, 0, 3)
        if crashes:
            scene.crash()
            again = scene.engine.start(scene.order, run)
            assert again["attempt"] == 1
        if tear and second % 7 == 3:
            for name in ("events.jsonl", "metrics.jsonl"):
                path = run.run_dir / name
                data = path.read_bytes() if path.exists() else b""
                path.write_bytes(data[: max(0, len(data) - 9)])
        scene.after(1.0)
        scene.engine.look(scene.order, run)
    assert scene.engine.look(scene.order, run).state is RunState.FINISHED
    return tuple(  # type: ignore[return-value]
        (run.run_dir / name).read_bytes().replace(str(scene.root).encode(), b"ROOT")
        for name in ("events.jsonl", "metrics.jsonl")
    )


def test_a_crash_at_any_second_neither_loses_nor_doubles_a_line(tmp_path: Path) -> None:
    found = []
    for name, crashes, tear in (("a", False, False), ("b", True, False), ("c", True, True)):
        folder = tmp_path / name
        folder.mkdir()
        found.append(_life(Scene(folder), crashes, tear))
    assert found[0] == found[1] == found[2]


def test_fast_clusters_write_few_lines_and_the_last_one(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ClusterSpec(name="sim", spares=0, seed=3, speed=20_000.0))
    run = scene.run(steps=1_000_000)
    before = 0
    for _ in range(3):
        scene.after(1.0)
        found = lines(run, "metrics.jsonl")
        assert 100 < len(found) - before < 600
        assert found[-1]["step"] == figure(scene.after(0.0), "steps")[0]
        before = len(found)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 500), st.integers(1, 300))
def test_steps_that_are_told_ascend_and_end_with_the_last(
    after: int, more: int, every: int, most: int
) -> None:
    found = chosen(after, after + more, every, most)
    assert found == sorted(set(found)) and len(found) <= most + 2
    assert all(after < step <= after + more and step % every == 0 for step in found)
    last = (after + more) // every * every
    assert found[-1:] == ([last] if last > after else [])


def test_a_hundred_thousand_chips_and_sixteen_clusters_cost_little(tmp_path: Path) -> None:
    def spent(scene: Scene, seconds: int) -> float:
        scene.after(1.0)
        begun_s = time.process_time()
        for _ in range(seconds):
            scene.after(1.0)
        return (time.process_time() - begun_s) / seconds

    large, small = tmp_path / "large", tmp_path / "small"
    large.mkdir()
    small.mkdir()
    scene = Scene(small)
    scene.run(ranks=64, steps=10**6)
    one = spent(scene, 50)
    hundred_thousand = spent(Scene(large, ClusterSpec(name="sim", spares=0, nodes=6250)), 3)
    # Of the processor's time, and generous: what is meant is 3 ms and 1 s.
    assert one < 0.02 and hundred_thousand < 3.0


def test_two_who_write_the_same_lines_write_them_once(tmp_path: Path) -> None:
    event = {"kind": "run_started", "simulated": "1/run_started", "resumed_from": None}
    step = {"step": 1, "loss": 2.0}
    first, second = Logbook(tmp_path), Logbook(tmp_path)
    for book in (first, second, first):
        book.write([event], [step], 0)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"kind": "' + b"x" * 500)  # torn, and longer than what comes next
    end = {"kind": "run_finished", "simulated": "1/run_finished", "step": 1}
    second.write([event, end], [step], 0)
    found = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["seq"] for line in found] == [1, 2]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_another_machine_has_nothing_of_what_ran_there(scene: Scene) -> None:
    run = scene.run()
    scene.after(100.0)
    scene.order = replace(scene.order, replaced_s={0: scene.clock.now_s})
    report = scene.after(10.0)
    found = scene.engine.look(scene.order, run)
    assert found.state is RunState.FAILED and "began anew" in found.message
    assert not figure(report, "steps").any()


class _WithSpares(ClusterOrder):
    """Spares stand on a node of their own, which is not full."""

    @property
    def chips(self) -> int:
        return self.spec.nodes * self.chips_per_node + 2


def test_a_last_node_may_hold_few_chips(scene: Scene) -> None:
    scene.order = _WithSpares(**vars(scene.order))
    scene.run(ranks=64, spares=2, redundancy="auto")
    scene.after(30.0)
    scene.fault(FaultKind.CHIP_DEAD, 1, 3)
    report = scene.after(30.0)
    assert [len(node.chips) for node in report.nodes] == [16, 16, 16, 16, 2]
    assert figure(report, "tensor_active").tolist().count(0.0) == 1
    assert list(scene.engine.act(scene.order, 4, NodeAction.CHECK))[-1].phase == "ready"
