"""The trainer of one rank: builds its part of the model and takes steps with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.plan.job import Job
from meshwright.plan.schedule import Orders, build, forwards_only
from meshwright.train.assembly import assemble
from meshwright.train.batches import places
from meshwright.train.gradients import Vote, finish_gradients, gradient_divisor, vote
from meshwright.train.mesh import Mesh
from meshwright.train.nn.dropout import Draws
from meshwright.train.optim import learning_rate
from meshwright.train.parallel.pipeline import RunKind
from meshwright.train.precision.scaling import LossScale, LossScaleSettings
from meshwright.train.replacing import Move

_UNSCALED = LossScaleSettings(initial=1.0, largest=1.0)


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats over `tokens` held-out targets."""

    loss: float
    tokens: int


class Trainer:
    """One rank's model, optimizer and schedule.

    `end_of_text` is the token that ends a document, needed where attention stays inside documents.
    """

    def __init__(
        self, job: Job, mesh: Mesh, device: torch.device, end_of_text: int | None = None
    ) -> None:
        self.job, self.mesh = job, mesh
        parts = assemble(job, mesh, device, end_of_text)
        self.stages, self.data, self.optimizer = parts.stages, parts.data, parts.optimizer
        self.pipeline, self.routing, self.replacer = parts.pipeline, parts.routing, parts.replacer
        fp16 = job.layout.precision == "fp16"
        self._scaling = LossScaleSettings() if fp16 else _UNSCALED
        # Losses are summed over tokens; fp16 has room for the gradients of a mean.
        batch_tokens = job.data.global_batch * job.data.seq_len
        self._scale_unit = 2.0 ** math.ceil(math.log2(batch_tokens)) if fp16 else 1.0
        self.loss_scale = LossScale.start(self._scaling)
        self._made_orders: dict[tuple[str, int], Orders] = {}

    def initialise(self) -> None:
        """Give every weight its initial value, the same for every layout."""
        self.data.initialise(self.stages, self.job.job.seed)

    def gradients(self, batches: Tensor, stop: bool = False, step: int = 0) -> Vote:
        """Forward and backward of one step; leaves summed gradients in the flat groups.

        `batches` [micro_batches, micro_batch, seq_len + 1] are this data-parallel rank's tokens.
        Dropout draws anew for every `step`.
        """
        draws = self._draws(batches, step)
        if self.routing.needs_seed:
            self._count_only(batches, draws)
            self.routing.seed()
        self.data.begin_step()
        self.routing.begin_step()
        scale = self._gradient_scale
        orders = self._orders(build, len(batches))
        kind = RunKind(training=True, loss_scale=scale, draws=draws)
        sums = self.pipeline.run(orders, batches, kind)
        self.data.finish_reduction()
        finish_gradients(self.data.groups, self.mesh)
        self.routing.sum_counts()
        return vote(self.data.groups, sums, self.mesh, stop, scale)

    def update(self, step: int, agreed: Vote) -> list[Move]:
        """Clip and apply the gradients of step `step` (from 0); experts that changed places after
        it. In fp16 a step whose gradients overflowed only lowers the loss scale."""
        scale = self._gradient_scale
        self.loss_scale = self.loss_scale.after(agreed.finite, self._scaling)
        if self._gradient_scale != scale:
            self.data.forget_compression_losses()
        if not agreed.finite:
            return []
        settings = self.job.optimizer
        rate = learning_rate(settings, step, self.job.job.steps)
        self.optimizer.step(rate, gradient_divisor(agreed, settings.grad_clip, scale))
        self.data.refresh()
        self.routing.learn()
        return self.replacer.after_step(self.routing.counts)

    @property
    def _gradient_scale(self) -> float:
        """What gradients of the summed loss are multiplied by."""
        return self.loss_scale.scale / self._scale_unit

    @property
    def may_skip(self) -> bool:
        """Whether an overflow is answered by a lower loss scale: only while there is one."""
        return self.loss_scale.scale > self._scaling.smallest

    def evaluate(self, batches: Tensor) -> Evaluation:
        """Mean loss over this and all other ranks' `batches`, shaped as for `gradients`."""
        sums = self.pipeline.run(
            self._forwards(batches), batches, RunKind(training=False, counting=False)
        )
        self.data.release()
        agreed = vote([], sums, self.mesh, stop=False)
        return Evaluation(agreed.loss, agreed.tokens)

    def _draws(self, batches: Tensor, step: int) -> Draws | None:
        """What dropout goes by; None without it."""
        if not self.job.model.dropout:
            return None
        layout = self.mesh.layout
        count = batches.shape[:2].numel() * layout.dp
        samples = torch.from_numpy(places(count, layout, self.mesh.dp_index))
        slices = layout.tp if layout.sequence_parallel else 1
        return Draws(self.job.job.seed, step, samples, self.mesh.tp.index % slices, slices)

    def _count_only(self, batches: Tensor, draws: Draws | None) -> None:
        """Route the step's tokens without training: only the counts are wanted."""
        self.routing.begin_step()
        kind = RunKind(training=False, draws=draws)
        self.pipeline.run(self._forwards(batches), batches, kind)
        self.data.release()
        self.routing.sum_counts()

    def _forwards(self, batches: Tensor) -> Orders:
        return self._orders(forwards_only, len(batches))

    def _orders(self, make: Callable[..., Orders], micro_batches: int) -> Orders:
        """Schedules are made once: a long zero-bubble one takes a second."""
        key = (make.__name__, micro_batches)
        if key not in self._made_orders:
            layout = self.mesh.layout
            how = (layout.schedule, layout.pp, layout.chunks)
            self._made_orders[key] = make(*how, micro_batches)
        return self._made_orders[key]
