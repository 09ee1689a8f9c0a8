"""AdamW on the master shards, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshwright.plan.job import OptimizerSection


def learning_rate(settings: OptimizerSection, step: int, steps: int) -> float:
    """Rate of step `step` (from 0) of `steps`: linear warm-up to `lr`, then a cosine to `min_lr`.

    A pure function of the step: a resumed run needs no scheduler state. arXiv 1608.03983.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    span = max(steps - 1 - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / span, 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.min_lr + (settings.lr - settings.min_lr) * cosine


@dataclass(frozen=True)
class _Part:
    """A run of one master shard that shares a weight decay."""

    master: Tensor
    grad: Tensor
    first_moment: Tensor
    second_moment: Tensor
    updates: Tensor

    @property
    def grad_at_home(self) -> Tensor:
        """The gradient in the type of the master and where that lives; itself if it is so."""
        return self.grad.to(self.master.device, self.master.dtype)


class Updated(Protocol):
    """What is updated as one: a master shard, its gradient, and how much of it decays."""

    @property
    def master(self) -> Tensor:
        """fp32."""

    @property
    def grad(self) -> Tensor:
        """As long as the master."""

    @property
    def decay_size(self) -> int:
        """Elements at its start that take weight decay."""


class MasterOptimizer:
    """AdamW over the fp32 master shards; no decay on norms and biases. arXiv 1711.05101.

    Moments live where the masters do: on the host if they are offloaded, where the update is then
    computed too. It calls the fused kernel that `torch.optim.AdamW(fused=True)` calls, since the
    first torch optimizer that a process makes imports the compiler: 2.4 s of CPU on each rank.
    """

    def __init__(self, groups: Sequence[Updated], settings: OptimizerSection) -> None:
        self._settings = settings
        self.moments = [(torch.zeros_like(g.master), torch.zeros_like(g.master)) for g in groups]
        self._decayed: list[_Part] = []
        self._plain: list[_Part] = []
        self._of_group: list[list[tuple[float, _Part]]] = []
        for group, (m, v) in zip(groups, self.moments, strict=True):
            edge, decay = group.decay_size, settings.weight_decay
            self._of_group.append([])
            runs = ((slice(0, edge), self._decayed), (slice(edge, None), self._plain))
            for run, parts in runs:
                if group.master[run].numel():
                    updates = torch.zeros((), device=group.master.device)
                    part = _Part(group.master[run], group.grad[run], m[run], v[run], updates)
                    parts.append(part)
                    self._of_group[-1].append((decay if parts is self._decayed else 0.0, part))

    def step(self, lr: float, divisor: float = 1.0) -> None:
        """Update every master shard by its gradient, which is divided by `divisor` in place."""
        self._update(self._decayed, lr, self._settings.weight_decay, divisor)
        self._update(self._plain, lr, 0.0, divisor)

    def step_group(self, index: int, lr: float, divisor: float) -> None:
        """The part of `step` that updates group `index`; all groups are to follow."""
        for decay, part in self._of_group[index]:
            self._update([part], lr, decay, divisor)

    @property
    def updates_done(self) -> int:
        """How many updates the moments have seen."""
        parts = (*self._decayed, *self._plain)
        return int(parts[0].updates) if parts else 0

    def set_updates_done(self, updates: int) -> None:
        """After a resume: how many updates the moments have seen (bias correction)."""
        for part in (*self._decayed, *self._plain):
            part.updates.fill_(updates)

    def _update(self, parts: list[_Part], lr: float, weight_decay: float, divisor: float) -> None:
        beta1, beta2 = self._settings.betas
        for part in parts:  # one by one: a gradient of another type or place is copied for it
            part.updates.add_(1)
            torch._fused_adamw_(
                [part.master],
                [part.grad_at_home],
                [part.first_moment],
                [part.second_moment],
                [],
                [part.updates],
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                eps=self._settings.eps,
                amsgrad=False,
                maximize=False,
                # One pass over the gradients fewer than scaling them first.
                grad_scale=torch.full((), divisor, device=part.master.device),
            )
