"""Training steps on a GPU: the CPU's numbers, however they are compiled, recomputed or offloaded.

Eager fp32 agrees within the rounding of sums (TF32 is off by default). Two whole steps are taken,
so that the optimizer's kernels are in what is compared.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from gpu_jobs import job, tokens

from meshwright.train.comm import Clock
from meshwright.train.mesh import build_mesh
from meshwright.train.trainer import Trainer

# The compiler and CUDA libraries warn of much that is no fault.
pytestmark = pytest.mark.filterwarnings("default")

STEPS = 2
CPU = torch.device("cpu")
EAGER: dict[str, Any] = {"compile": False}


def trainer_of(
    model: str, layout: dict[str, Any], device: torch.device, packed: bool = False
) -> Trainer:
    """A trainer with the weights that it begins with."""
    what = job(model, STEPS, EAGER | layout, packed=packed)
    trainer = Trainer(what, build_mesh(what.layout, 0, Clock()), device, end_of_text=1)
    trainer.initialise()
    return trainer


def steps(trainer: Trainer) -> list[float]:
    """Loss and gradient norm of every step, then the loss of an evaluation."""
    found = []
    for step in range(STEPS):
        agreed = trainer.gradients(tokens(trainer.job, step), step=step)
        trainer.update(step, agreed)
        found += [agreed.loss, agreed.grad_norm]
    return [*found, trainer.evaluate(tokens(trainer.job, STEPS)).loss]


@pytest.mark.parametrize("model", ["llama", "moe", "mla"])
def test_fp32_agrees_with_the_cpu(gpu: torch.device, model: str) -> None:
    ours, theirs = (steps(trainer_of(model, {}, device)) for device in (gpu, CPU))
    assert ours == pytest.approx(theirs, rel=2e-4)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)


@pytest.mark.parametrize("model", ["llama", "moe", "mla"])
def test_bf16_agrees_with_the_cpu(gpu: torch.device, model: str) -> None:
    bf16 = {"precision": "bf16"}
    ours, theirs = (steps(trainer_of(model, bf16, device)) for device in (gpu, CPU))
    assert ours == pytest.approx(theirs, rel=2e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_stays_inside_documents(gpu: torch.device, precision: str) -> None:
    how = {"precision": precision}
    ours, theirs = (steps(trainer_of("llama", how, device, packed=True)) for device in (gpu, CPU))
    assert ours == pytest.approx(theirs, rel=2e-4 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize(
    "layout",
    [
        {"recompute": "full"},
        {"recompute": "selective"},
        {"loss_chunk": 48},
        {"offload": "optimizer"},
        {"offload": "activations"},
        {"offload": "both", "recompute": "selective", "loss_chunk": 48},
    ],
    ids=str,
)
def test_ways_to_save_memory_change_nothing(gpu: torch.device, layout: dict[str, Any]) -> None:
    ours, theirs = (steps(trainer_of("llama", how, gpu)) for how in (layout, {}))
    assert ours == pytest.approx(theirs, rel=2e-4)


def test_offloaded_activations_leave_the_gpu(gpu: torch.device) -> None:
    peaks = []
    for offload in ("none", "activations"):
        trainer = trainer_of("llama", {"offload": offload}, gpu)
        steps(trainer)
        torch.cuda.reset_peak_memory_stats(gpu)
        held = torch.cuda.memory_allocated(gpu)
        trainer.gradients(tokens(trainer.job, 0))
        peaks.append(torch.cuda.max_memory_allocated(gpu) - held)
        del trainer
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_fp8_trains_as_its_emulation(gpu: torch.device, scaling: str) -> None:
    fp8 = {"precision": "fp8", "fp8_scaling": scaling}
    ours, theirs = (steps(trainer_of("llama", fp8, device)) for device in (gpu, CPU))
    assert ours == pytest.approx(theirs, rel=3e-2)


@pytest.mark.parametrize(
    ("model", "layout", "rel"),
    [
        ("llama", {}, 2e-4),
        ("llama", {"precision": "bf16", "recompute": "full"}, 2e-2),
        ("llama", {"precision": "fp8"}, 3e-2),
        ("moe", {}, 2e-4),
    ],
    ids=str,
)
def test_compiling_changes_nothing_but_rounding(
    gpu: torch.device, model: str, layout: dict[str, Any], rel: float
) -> None:
    compiled, eager = (
        steps(trainer_of(model, layout | {"compile": on}, gpu)) for on in (True, False)
    )
    assert compiled == pytest.approx(eager, rel=rel)


def test_a_dense_step_waits_for_the_gpu_once(gpu: torch.device) -> None:
    trainer = trainer_of("llama", {"precision": "bf16"}, gpu)
    steps(trainer)
    torch.cuda.synchronize(gpu)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.update(0, trainer.gradients(tokens(trainer.job, 0)))
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    assert len(waits) == 1, waits
