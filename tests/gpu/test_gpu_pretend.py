"""Everything lies on the chip where it belongs, and nothing waits for it more often than it must.

Runs without a GPU: see `pretend_chip.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_jobs import MODELS
from pretend_steps import CASES, STEPS

PASSES = STEPS + 1  # the last is an evaluation
MICRO_BATCHES = 2
ROUNDED = {"bf16": 1e-3, "fp16": 1e-3, "fp8": 1e-2, "optimizer on the host": 1e-3}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What `pretend_steps.py` prints."""
    program = Path(__file__).with_name("pretend_steps.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("case", CASES)
def test_the_chip_takes_the_steps_of_the_cpu(found: dict[str, Any], case: str) -> None:
    pairs = zip(found[case]["found"], found[case]["expected"], strict=True)
    for ours, theirs in pairs:
        assert ours == pytest.approx(theirs, rel=ROUNDED.get(case, 1e-5))
    assert found[case]["left_on_cpu"] == 0


@pytest.mark.parametrize("case", ["llama", "bf16", "fp16", "activations on the host", "dropout"])
def test_a_dense_step_waits_for_the_chip_once(found: dict[str, Any], case: str) -> None:
    assert found[case]["waits"] == PASSES


@pytest.mark.parametrize("model", ["moe", "mla"])
def test_routed_layers_wait_once_a_micro_batch(found: dict[str, Any], model: str) -> None:
    routed = MODELS[model]["layers"] - MODELS[model].get("first_dense_layers", 0)
    assert found[model]["waits"] == PASSES * (1 + routed * MICRO_BATCHES)


def test_activations_go_to_the_host_and_weights_do_not(found: dict[str, Any]) -> None:
    assert found["activations on the host"]["streamed"] > 0
    assert found["short activations on the host"]["streamed"] == 0
    assert found["llama"]["streamed"] == 0
