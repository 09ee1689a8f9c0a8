"""Takes the same steps on the CPU and on a pretended chip; prints what each case found as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_jobs import MODELS, SEQ_LEN, job, tokens
from pretend_chip import Pretending, pretend

from meshwright.train.comm import Clock
from meshwright.train.mesh import build_mesh
from meshwright.train.trainer import Trainer

STEPS = 2


@dataclass(frozen=True)
class Case:
    """A model and the keys of its layout; `changes` are of the model."""

    model: str
    layout: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    seq_len: int = SEQ_LEN


CASES = {
    **{model: Case(model) for model in MODELS},
    "bf16": Case("llama", {"precision": "bf16", "grad_precision": "bf16"}),
    "fp16": Case("llama", {"precision": "fp16"}),
    "fp8": Case("moe", {"precision": "fp8", "fp8_scaling": "block"}),
    "packed": Case("mla", packed=True),
    "recomputed": Case("moe", {"recompute": "full", "loss_chunk": 8}),
    "optimizer on the host": Case("llama", {"offload": "optimizer", "precision": "bf16"}),
    "activations on the host": Case("llama", {"offload": "activations"}),
    # Of a micro-batch this short no activation is large enough for the way: what goes is a weight.
    "short activations on the host": Case("llama", {"offload": "activations"}, seq_len=8),
    "dropout": Case("llama", changes={"dropout": 0.1}),
    "capacity": Case("moe", changes={"capacity_factor": 1.0, "aux_loss": 0.01, "z_loss": 1e-3}),
}


def steps(case: Case, device: torch.device) -> tuple[list[list[float]], list[int]]:
    """Loss and gradient norm of each step and the loss of an evaluation; state that was saved."""
    what = job(case.model, STEPS, case.layout, case.changes, case.packed, case.seq_len)
    trainer = Trainer(what, build_mesh(what.layout, 0, Clock()), device, end_of_text=1)
    trainer.initialise()
    found = []
    for step in range(STEPS):
        agreed = trainer.gradients(tokens(what, step), step=step)
        trainer.update(step, agreed)
        found.append([agreed.loss, agreed.grad_norm])
    found.append([trainer.evaluate(tokens(what, STEPS)).loss])
    return found, [buffer.device.type == "cpu" for buffer in _state(trainer)]


def _state(trainer: Trainer) -> list[torch.Tensor]:
    return [buffer for model in trainer.stages.values() for buffer in model.buffers()]


def main() -> None:
    """Run every case."""
    chip, found = pretend(), {}
    for name, case in CASES.items():
        expected, _ = steps(case, torch.device("cpu"))
        with Pretending() as pretending:
            on_chip, left = steps(case, chip)
        traffic = pretending.traffic
        found[name] = {
            "expected": expected,
            "found": on_chip,
            "left_on_cpu": sum(left),
            "waits": traffic.waits,
            "streamed": traffic.streamed,
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
