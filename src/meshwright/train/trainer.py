"""The trainer of one rank: builds its part of the model and takes steps with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshwright.base.pulse import Phase
from meshwright.plan.job import Job
from meshwright.plan.schedule import Orders, build, forwards_only
from meshwright.train.assembly import assemble
from meshwright.train.bad_samples import count_bad
from meshwright.train.batches import places
from meshwright.train.gradients import Vote, finish_gradients, gradient_divisor, vote
from meshwright.train.mesh import Mesh
from meshwright.train.nn.dropout import Draws
from meshwright.train.optim import learning_rate
from meshwright.train.parallel.pipeline import RunKind, StepSums
from meshwright.train.precision.scaling import LossScale, LossScaleSettings
from meshwright.train.replacing import Move

_UNSCALED = LossScaleSettings(initial=1.0, largest=1.0)


class Redundancy(Protocol):
    """Who keeps the state of other ranks in step with this one's."""

    def log(self) -> None:
        """This rank's gradients are whole, and the vote is next. Raises Interrupted."""

    def apply(self, rate: float | None, divisor: float) -> bool:
        """The step counts, at learning rate `rate`; None: it was skipped. Whether this rank's own
        update was made as well. Never raises Interrupted."""


@dataclass(frozen=True)
class OwnWork:
    """What this rank's replica has worked out of step `step`; its gradients are not added up over
    replicas yet, or can be again."""

    step: int
    sums: StepSums


class Guard(Protocol):
    """Who looks for errors of this chip. Steps count from 0. Each raises RunError where it is the
    one that errs."""

    def before_vote(self, step: int) -> None:
        """The gradients of `step` are whole, and nothing is overwritten. Raises Interrupted."""

    def before_update(self, step: int) -> None:
        """`step` counts, and the update is next. Asks nobody."""

    def after_update(self) -> None:
        """The update is made."""


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
        self.applied = 0  # steps that are in the weights, skipped ones included
        self.bad_samples = 0  # left out in these steps, by all ranks
        self.reduced: int | None = None  # the step whose summed gradients are whole here
        self.agreed: tuple[int, Vote] | None = None  # the last step that was voted on, from 0
        self.seeded_before = False  # what `abandon` goes back to
        self.own: OwnWork | None = None
        self.inside = False  # at what only ranks of this replica take part in
        self.stale = True  # the weights in use have not followed the masters yet
        self.redundancy: Redundancy | None = None
        self.guard: Guard | None = None
        self.before_change: Callable[[], object] = lambda: None  # of masters and moments

    def initialise(self) -> None:
        """Give every weight its initial value, the same for every layout."""
        self.data.initialise(self.stages, self.job.job.seed)
        self.stale = False

    def gradients(self, batches: Tensor, stop: bool = False, step: int = 0, save: int = 0) -> Vote:
        """Forward and backward of one step; leaves summed gradients in the flat groups.

        `batches` [micro_batches, micro_batch, seq_len + 1] are this data-parallel rank's tokens.
        Dropout draws anew for every `step`.
        """
        scale = self._gradient_scale
        self.reduced = None
        if self.own is not None and self.own.step == step:  # a step that is repeated
            self.data.sum_again()
        else:
            self.own, self.inside = None, True
            self.own = OwnWork(step, self._own_gradients(batches, step, scale))
            self.inside = False
        self.mesh.clock.enter(Phase.REDUCE)
        self.data.finish_reduction()
        finish_gradients(self.data.groups, self.mesh)
        self.routing.sum_counts()
        self.reduced = step
        if self.redundancy is not None:
            self.redundancy.log()
        self.mesh.clock.enter(Phase.VOTE)
        if self.guard is not None:
            self.guard.before_vote(step)
        bad = count_bad(batches, self.mesh)
        agreed = vote(self.data.groups, self.own.sums, self.mesh, stop, scale, bad, save)
        self.agreed = (step, agreed)
        return agreed

    def _own_gradients(self, batches: Tensor, step: int, scale: float) -> StepSums:
        """Those of this rank's replica; their sums over replicas have begun."""
        draws = self._draws(batches, step)
        self.seeded_before = self.routing.seeded
        if self.routing.needs_seed:
            self._count_only(batches, draws)
            self.routing.seed()
        self.data.begin_step()
        self.routing.begin_step()
        kind = RunKind(gradients=True, loss_scale=scale, draws=draws)
        sums = self.pipeline.run(self._orders(build, len(batches)), batches, kind)
        self.data.finish_scatters()
        return sums

    def update(self, step: int, agreed: Vote) -> list[Move]:
        """Clip and apply the gradients of step `step` (from 0); experts that changed places after
        it. In fp16 a step whose gradients overflowed only lowers the loss scale."""
        self.mesh.clock.enter(Phase.OPTIMIZER)
        if not self.apply(step, agreed):
            return []
        self.refresh()
        return self.replacer.after_step(self.routing.counts)

    def refresh(self) -> None:
        """Have the weights in use follow the masters; all ranks of the replica."""
        self.inside = self.stale = True
        self.data.refresh()
        self.inside = self.stale = False

    def apply(self, step: int, agreed: Vote) -> bool:
        """The part of `update` that asks nobody: from here on the step is in this rank's state, but
        for the weights in use, which `refresh` has follow. Whether anything was learnt."""
        self.before_change()
        scale = self._gradient_scale
        self.loss_scale = self.loss_scale.after(agreed.finite, self._scaling)
        if self._gradient_scale != scale:
            self.data.forget_compression_losses()
        self.applied = step + 1
        self.data.forget_sums()
        self.bad_samples += agreed.bad
        self.routing.seeded = self.seeded_before = True
        settings = self.job.optimizer
        rate = learning_rate(settings, step, self.job.job.steps) if agreed.finite else None
        divisor = gradient_divisor(agreed, settings.grad_clip, scale) if agreed.finite else 1.0
        if self.guard is not None:
            self.guard.before_update(step)
        made = self.redundancy is not None and self.redundancy.apply(rate, divisor)
        if rate is None:
            return False
        if not made:
            self.optimizer.step(rate, divisor)
        self.stale = True
        if self.guard is not None:
            self.guard.after_update()
        self.routing.learn()
        return True

    def abandon(self) -> None:
        """Put everything between two steps back as if the step had not begun, whatever it was
        interrupted at. Gradients that were whole already (`reduced`) stay, and so does a vote.
        Call `refresh` before the next forward, on all ranks."""
        self.own, self.inside, self.stale = None, False, True
        torch.set_grad_enabled(True)  # whatever block has been left by an exception in its exit
        self.pipeline.abandon()
        self.data.abandon()
        self.routing.seeded = self.seeded_before
        for model in self.stages.values():
            model.zero_grad(set_to_none=True)

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
        kind = RunKind(gradients=False, routing=False)
        self.inside = True
        sums = self.pipeline.run(self._forwards(batches), batches, kind)
        self.data.release()
        self.inside = False
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
        kind = RunKind(gradients=False, draws=draws)
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
