"""The trainer of one rank: builds its part of the model and takes steps with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.plan.job import Job
from meshwright.plan.layout import stage_layers
from meshwright.plan.schedule import Action, one_f_one_b
from meshwright.train.gradients import Vote, finish_gradients, gradient_divisor, vote
from meshwright.train.mesh import Mesh
from meshwright.train.nn.decoder import Decoder
from meshwright.train.optim import MasterOptimizer, learning_rate
from meshwright.train.parallel.data import DataParallel
from meshwright.train.parallel.pipeline import PipelineStage
from meshwright.train.parallel.tensor import apply_tensor_parallel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats over `tokens` held-out targets."""

    loss: float
    tokens: int


class Trainer:
    """One rank's model, optimizer and schedule."""

    def __init__(self, job: Job, mesh: Mesh, device: torch.device) -> None:
        self.job, self.mesh = job, mesh
        layers = stage_layers(job.model.layers, job.layout.pp)[mesh.at.pp]
        dtype = DTYPES[job.layout.precision]
        # The parallel recipe: cut by stage, then by tensor, then flatten over data.
        with torch.device("meta"):
            self.model = Decoder(job.model, layers)
        apply_tensor_parallel(self.model, mesh.tp, job.layout.sequence_parallel)
        self.data = DataParallel(self.model, mesh, dtype, device)
        self.stage = PipelineStage(self.model, self.data, mesh, dtype, device)
        self.optimizer = MasterOptimizer(self.data.groups, job.optimizer)

    def initialise(self) -> None:
        """Give every weight its initial value, the same for every layout."""
        self.data.initialise(self.model, self.job.job.seed)

    def gradients(self, batches: Tensor, stop: bool = False) -> Vote:
        """Forward and backward of one step; leaves summed gradients in the flat groups.

        `batches` [micro_batches, micro_batch, seq_len + 1] are this data-parallel rank's tokens.
        """
        self.data.begin_step()
        actions = one_f_one_b(self.mesh.at.pp, self.mesh.layout.pp, len(batches))
        sums = self.stage.run(actions, batches)
        self.data.finish_reduction()
        finish_gradients(self.data.groups, self.mesh)
        return vote(self.data.groups, sums, self.mesh, stop)

    def update(self, step: int, agreed: Vote) -> None:
        """Clip and apply the gradients of step `step` (from 0)."""
        settings = self.job.optimizer
        rate = learning_rate(settings, step, self.job.job.steps)
        self.optimizer.step(rate, gradient_divisor(agreed, settings.grad_clip))
        self.data.refresh()

    def evaluate(self, batches: Tensor) -> Evaluation:
        """Mean loss over this and all other ranks' `batches`, shaped as for `gradients`."""
        actions = [Action("forward", m) for m in range(len(batches))]
        sums = self.stage.run(actions, batches)
        self.data.release()
        agreed = vote([], sums, self.mesh, stop=False)
        return Evaluation(agreed.loss, agreed.tokens)
