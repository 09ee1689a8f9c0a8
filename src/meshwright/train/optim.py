"""AdamW on the master shards, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from meshwright.plan.job import OptimizerSection
from meshwright.train.parallel.flat import FlatGroup


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


class MasterOptimizer:
    """torch's AdamW over the fp32 master shards; no decay on norms and biases."""

    def __init__(self, groups: list[FlatGroup], settings: OptimizerSection) -> None:
        self._groups = groups
        self.moments = [(torch.zeros_like(g.master), torch.zeros_like(g.master)) for g in groups]
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        state: dict[Tensor, dict[str, Tensor]] = {}
        for group, (m, v) in zip(groups, self.moments, strict=True):
            edge = group.decay_size
            for part, bucket in ((slice(0, edge), decayed), (slice(edge, None), plain)):
                if group.master[part].numel() == 0:
                    continue
                parameter = nn.Parameter(group.master[part])
                parameter.grad = group.grad[part]
                bucket.append(parameter)
                state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": m[part],
                    "exp_avg_sq": v[part],
                }
        self._adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        self._adamw.state.update(state)

    def step(self, lr: float) -> None:
        """Update every master shard by its gradient."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def set_updates_done(self, updates: int) -> None:
        """After a resume: how many updates the moments have seen (bias correction)."""
        for state in self._adamw.state.values():
            state["step"].fill_(updates)
