"""How a simulated cluster is made ready, and that a fault does not get by."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from sim_scene import Scene

from meshwright.base.errors import RunError
from meshwright.catalog import chip
from meshwright.control.spec import ClusterSpec
from meshwright.control.words import FaultKind, NodeAction

PHASES = ["initialise", "wire", "mount", "compute", "memory", "bandwidth", "fp8", "drill", "ready"]


def test_deployment_measures_all(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    begun_s = time.process_time()
    steps = list(scene.engine.deploy(scene.order))
    assert time.process_time() - begun_s < 5.0
    assert [step.phase for step in steps] == PHASES
    progress = [step.progress for step in steps]
    assert progress == sorted(progress) and progress[-1] == 1.0
    figures = {name: value for step in steps for name, value in step.figures.items()}
    trainium = chip("trainium2")
    for name, peak in (
        ("compute_tflops", trainium.peak_flops["bf16"] / 1e12),
        ("fp8_tflops", trainium.peak_flops["fp8"] / 1e12),
        ("memory_tb_s", trainium.memory_bandwidth_bytes_s / 1e12),
        ("link_gb_s", 512.0),
    ):
        assert 0.8 * peak < figures[f"{name}_min"] <= figures[f"{name}_median"] < peak
    assert 0 < figures["detected_s"] < figures["takeover_s"]
    assert list(scene.engine.deploy(scene.order)) == steps


def test_chips_without_fp8_are_not_held_to_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ClusterSpec(name="sim", spares=0, instance="a100-40"))
    steps = {step.phase: step for step in scene.engine.deploy(scene.order)}
    assert not steps["fp8"].figures and steps["compute"].figures


FAULTS = [
    (FaultKind.CHIP_DEAD, 0.5), (FaultKind.CHIP_SLOW, 0.2), (FaultKind.CHIP_CORRUPT, 0.5),
    (FaultKind.OVERHEAT, 40.0), (FaultKind.POWER_CAP, 0.4), (FaultKind.MEMORY_ERRORS, 1.0),
    (FaultKind.MEMORY_FATAL, 0.5), (FaultKind.LINK_DOWN, 0.5), (FaultKind.LINK_SLOW, 0.3),
    (FaultKind.NODE_DOWN, 0.5), (FaultKind.NODE_UNREACHABLE, 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "severity"), FAULTS)
def test_the_self_test_names_what_is_wrong(
    tmp_path: Path, kind: FaultKind, severity: float
) -> None:
    scene = Scene(tmp_path)
    whole = kind in (FaultKind.NODE_DOWN, FaultKind.NODE_UNREACHABLE)
    fault = scene.fault(kind, 2, None if whole else 7, severity)
    words = "node 2" if whole else "node 2 chip 7 "
    with pytest.raises(RunError, match=words):
        list(scene.engine.deploy(scene.order))
    with pytest.raises(RunError, match=words):
        list(scene.engine.act(scene.order, 2, NodeAction.CHECK))
    assert list(scene.engine.act(scene.order, 1, NodeAction.CHECK))[-1].phase == "ready"
    scene.clock.now_s += 1.0
    scene.engine.clear(scene.order, fault)
    assert list(scene.engine.deploy(scene.order))[-1].phase == "ready"
