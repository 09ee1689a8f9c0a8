"""Chips of a simulated cluster: figures, faults, heat, and that nothing is left to chance."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_scene import BEGIN_S, Scene, figure

from meshwright.base.errors import ConfigError
from meshwright.control.engines.engine import ClusterOrder, Fault
from meshwright.control.engines.simulated import SimulatedEngine
from meshwright.control.engines.simulation.dice import arrivals, leaves, mix
from meshwright.control.engines.simulation.machine import LIMIT_C
from meshwright.control.figures import FIGURE_NAMES
from meshwright.control.spec import ClusterSpec
from meshwright.control.words import FaultKind, Health, NodeAction, NodeStatus

TDP_W = 500.0


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_busy_chip_differs_from_an_idle_one(scene: Scene) -> None:
    scene.run()
    report = scene.after(200.0)
    assert report.sample is not None and report.sample.shape == (64, 16)
    for name in ("utilization", "tensor_active", "memory_used_bytes", "memory_active", "power_w",
                 "temperature_c", "memory_temperature_c", "link_sent_bytes_s",
                 "link_received_bytes_s", "steps"):  # fmt: skip
        found = figure(report, name)
        assert found[:16].min() > found[16:].max(), name
    for name in ("throttled", "link_errors", "ecc_uncorrected", "errors"):
        assert not figure(report, name).any(), name
    assert np.ptp(figure(report, "power_w")[:16]) > 1.0  # no two are alike
    assert all(node.health is Health.HEALTHY for node in report.nodes)


def test_the_same_words_give_the_same_bytes(tmp_path: Path) -> None:
    samples: list[bytes] = []
    others: list[bytes] = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        folder = tmp_path / name
        folder.mkdir()
        scene = Scene(folder, ClusterSpec(name="sim", spares=0, seed=seed))
        scene.run()
        if name == "a":  # whoever looks more often sees the same
            for _ in range(40):
                scene.after(1.0)
            report = scene.after(13.0)
        else:
            report = scene.after(53.0)
        assert report.sample is not None
        (others if seed == 4 else samples).append(report.sample.tobytes())
    assert samples[0] == samples[1] != others[0]


def test_a_new_engine_sees_the_same_chips(scene: Scene) -> None:
    scene.run()
    scene.fault(FaultKind.OVERHEAT, severity=40)
    scene.after(31.0)
    scene.fault(FaultKind.MEMORY_ERRORS, 1, 2, severity=100)
    before = scene.after(20.0)
    scene.crash()
    after = scene.after(0.0)
    assert before.sample is not None and after.sample is not None
    assert before.sample.tobytes() == after.sample.tobytes()
    assert before.nodes == after.nodes


HURT = (
    (FaultKind.CHIP_SLOW, 0.3, "clock_mhz", -1),
    (FaultKind.OVERHEAT, 30.0, "temperature_c", 1),
    (FaultKind.POWER_CAP, 0.5, "power_w", -1),
    (FaultKind.MEMORY_ERRORS, 5.0, "ecc_corrected", 1),
    (FaultKind.LINK_DOWN, 0.5, "link_errors", 1),
    (FaultKind.LINK_SLOW, 0.5, "link_errors", 1),
    (FaultKind.CHIP_CORRUPT, 0.5, "errors", 1),
)


@pytest.mark.parametrize(("kind", "severity", "name", "sign"), HURT)
def test_a_fault_shows_in_its_chip_alone_while_it_lasts(
    scene: Scene, kind: FaultKind, severity: float, name: str, sign: int
) -> None:
    scene.run(ranks=64, steps=100_000)
    sound = figure(scene.after(200.0), name).astype(float)
    scene.fault(kind, 1, 5, severity, seconds=100.0)
    report = scene.after(80.0)
    change = figure(report, name).astype(float) - sound
    assert sign * change[21] > abs(np.delete(change, 21)).max() * 1.5 + 0.5
    link = kind in (FaultKind.LINK_DOWN, FaultKind.LINK_SLOW)
    node = report.nodes[1]
    assert (node.links if link else node.chips)[5] is not Health.HEALTHY
    assert (node.chips if link else node.links)[5] is Health.HEALTHY
    assert node.health is Health.DEGRADED and "chip 5" in node.message
    assert all(other.health is Health.HEALTHY for other in report.nodes if other is not node)
    later = scene.after(300.0)
    if kind is not FaultKind.CHIP_CORRUPT:
        assert all(one.health is Health.HEALTHY for one in later.nodes)
        more = figure(scene.after(80.0), name)[21] - figure(later, name)[21]
        assert abs(more) < abs(change[21]) / 4


def test_a_dead_chip_does_not_answer(scene: Scene) -> None:
    scene.fault(FaultKind.CHIP_DEAD, 2, 1)
    report = scene.after(5.0)
    missing = np.isnan(figure(report, "power_w"))
    assert missing[33] and missing.sum() == 1
    assert report.nodes[2].chips[1] is Health.FAILED
    assert report.nodes[2].status is NodeStatus.RUNNING


def test_a_fault_of_no_chip_hurts_none(scene: Scene) -> None:
    with pytest.raises(ConfigError, match="16 chips"):
        scene.fault(FaultKind.CHIP_DEAD, 0, 20)  # the order has it all the same
    assert len(scene.order.faults) == 1
    assert not np.isnan(figure(scene.after(5.0), "power_w")).any()


def test_an_uncorrected_error_is_counted_once(scene: Scene) -> None:
    scene.fault(FaultKind.MEMORY_FATAL, 2, 1)
    scene.after(5.0)
    report = scene.after(500.0)
    assert figure(report, "ecc_uncorrected")[33] == 1 == figure(report, "ecc_uncorrected").sum()
    assert report.nodes[2].chips[1] is Health.FAILED


def test_no_power_is_failed_and_no_sight_is_unknown(scene: Scene) -> None:
    scene.fault(FaultKind.NODE_DOWN, 1, seconds=10.0)
    scene.fault(FaultKind.NODE_UNREACHABLE, 2, seconds=10.0)
    report = scene.after(5.0)
    assert [node.status for node in report.nodes] == [
        NodeStatus.RUNNING, NodeStatus.FAILED, NodeStatus.UNKNOWN, NodeStatus.RUNNING,
    ]  # fmt: skip
    assert set(report.nodes[1].chips) == {Health.FAILED}
    assert set(report.nodes[2].chips) == {Health.UNKNOWN}
    assert np.isnan(figure(report, "power_w")).reshape(4, 16).all(axis=1).tolist() == [0, 1, 1, 0]
    assert {node.status for node in scene.after(6.0).nodes} == {NodeStatus.RUNNING}


def test_dead_links_load_the_neighbours(scene: Scene) -> None:
    scene.run(ranks=64)
    scene.after(100.0)
    scene.fault(FaultKind.LINK_DOWN, 1, 5)
    sent = figure(scene.after(10.0), "link_sent_bytes_s")
    rest = np.median(sent[16:32])
    near = np.flatnonzero(sent > 1.15 * rest).tolist()
    # Chip 5 of a 4 x 4 torus is at (1, 1): next to 1, 4, 6 and 9.
    assert near == [16 + one for one in (1, 4, 6, 9)]
    assert sent[21] < rest


def test_heat_holds_a_chip_at_its_limit_and_slows_the_run(scene: Scene) -> None:
    scene.run(ranks=64)
    scene.after(200.0)
    before = figure(scene.after(100.0), "steps") - figure(scene.after(-100.0), "steps")
    scene.clock.now_s += 100.0
    scene.fault(FaultKind.OVERHEAT, 1, 5, severity=45.0)
    report = scene.after(200.0)
    assert figure(report, "throttled")[21] == 1.0 == figure(report, "throttled").sum()
    assert figure(report, "temperature_c")[21] == pytest.approx(LIMIT_C, abs=0.5)
    assert figure(report, "clock_mhz")[21] < 1300.0
    first = figure(report, "steps")
    after = figure(scene.after(100.0), "steps") - first
    assert after[0] < 0.9 * before[0]


@settings(deadline=None, max_examples=25)
@given(
    faults=st.lists(
        st.tuples(
            st.sampled_from([FaultKind.OVERHEAT, FaultKind.POWER_CAP, FaultKind.CHIP_SLOW,
                             FaultKind.LINK_DOWN, FaultKind.CHIP_DEAD, FaultKind.NODE_DOWN]),
            st.integers(0, 1), st.one_of(st.none(), st.integers(0, 15)),
            st.floats(0.01, 900.0), st.floats(0.0, 300.0), st.one_of(st.none(), st.floats(1, 200)),
        ), max_size=5,
    ),
    seed=st.integers(0, 1000),
    times=st.lists(st.floats(0.0, 900.0), min_size=1, max_size=4),
)  # fmt: skip
def test_heat_and_power_stay_within_physics(
    tmp_path_factory: pytest.TempPathFactory,
    faults: list[tuple[FaultKind, int, int | None, float, float, float | None]],
    seed: int,
    times: list[float],
) -> None:
    spec = ClusterSpec(name="sim", spares=0, nodes=2, seed=seed)
    scene = Scene(tmp_path_factory.mktemp("sim"), spec)
    scene.run(ranks=32)
    order = ClusterOrder(
        **{**vars(scene.order), "faults": tuple(
            Fault(str(n), kind, node, chip, much, BEGIN_S + since, till and BEGIN_S + since + till)
            for n, (kind, node, chip, much, since, till) in enumerate(faults)
        )}
    )  # fmt: skip
    counters: np.ndarray[tuple[int, int], np.dtype[np.float32]] | None = None
    for time_s in sorted(times):
        sample = scene.engine.observe(order, BEGIN_S + time_s).sample
        assert sample is not None
        by = dict(zip(FIGURE_NAMES, sample.T, strict=True))
        seen = ~np.isnan(by["power_w"])
        assert (by["power_w"][seen] >= 0).all() and (by["power_w"][seen] <= TDP_W).all()
        assert (by["temperature_c"][seen] > 15).all() and (by["temperature_c"][seen] < 115).all()
        for name in ("utilization", "tensor_active", "memory_active", "throttled"):
            assert ((by[name][seen] >= 0) & (by[name][seen] <= 1)).all(), name
        assert (by["memory_used_bytes"][seen] <= 96 * 2**30).all()
        now = np.stack([by[name] for name in ("link_errors", "ecc_corrected", "errors", "steps")])
        if counters is not None:
            both = ~np.isnan(now) & ~np.isnan(counters)
            assert (now[both] >= counters[both]).all()
        counters = now


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.lists(st.floats(0.0, 5e4), min_size=2, max_size=5))
def test_a_counter_of_chance_never_falls(seed: int, expected: list[float]) -> None:
    keys = mix(seed, np.arange(50).astype(np.uint64))
    counts = [arrivals(keys, leaves(keys, np.full(50, one))) for one in sorted(expected)]
    assert all((later >= before).all() for before, later in pairwise(counts))


@pytest.mark.parametrize("expected", [0.5, 3.0, 100.0, 30_000.0])
def test_counts_are_those_of_a_poisson_process(expected: float) -> None:
    keys = mix(1, np.arange(20_000).astype(np.uint64))
    counts = arrivals(keys, leaves(keys, np.full(20_000, expected)))
    assert counts.mean() == pytest.approx(expected, rel=0.02)
    assert counts.var() == pytest.approx(expected, rel=0.15)


def test_a_reboot_clears_what_a_reboot_clears(scene: Scene) -> None:
    scene.fault(FaultKind.CHIP_DEAD, 1, 3)
    scene.fault(FaultKind.CHIP_SLOW, 1, 4)
    scene.after(10.0)
    with pytest.raises(Exception, match="node 1 chip 4"):
        list(scene.engine.act(scene.order, 1, NodeAction.REBOOT))
    report = scene.after(10.0)
    assert report.nodes[1].chips[3] is Health.HEALTHY
    assert report.nodes[1].chips[4] is Health.DEGRADED
    scene.crash()
    assert scene.after(0.0).nodes == report.nodes


def test_a_replaced_node_is_another_machine(scene: Scene) -> None:
    scene.fault(FaultKind.CHIP_SLOW, 1, 4)
    scene.fault(FaultKind.MEMORY_ERRORS, 2, severity=10)
    idle = figure(scene.after(500.0), "power_w")
    steps = list(scene.engine.act(scene.order, 1, NodeAction.REPLACE))
    assert steps[-1].phase == "ready"
    report = scene.after(500.0)
    assert report.nodes[1].health is Health.HEALTHY
    assert report.nodes[2].health is Health.DEGRADED
    change = abs(figure(report, "power_w") - idle)
    assert change[16:32].mean() > 2 * change[:16].mean()


def test_what_cannot_be_made_or_done_is_refused(scene: Scene) -> None:
    engine = SimulatedEngine()
    for changes, key in (
        ({"instance": "trn9"}, "instance"),
        ({"instance": "tpu-v5e", "nodes": 17}, "nodes"),
    ):
        with pytest.raises(ConfigError) as caught:
            engine.refuse(ClusterSpec(**{"name": "x", **changes}))  # type: ignore[arg-type]
        assert caught.value.key == key
    engine.refuse(ClusterSpec(name="x", nodes=6250, spares=4))
    for node, chip, severity, key in (
        (9, 0, 0.5, "node"),
        (0, 16, 0.5, "chip"),
        (0, 0, 2.0, "severity"),
    ):
        with pytest.raises(ConfigError) as caught:
            scene.fault(FaultKind.CHIP_SLOW, node, chip, severity)
        assert caught.value.key == key
