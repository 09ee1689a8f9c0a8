"""Next-token cross-entropy, summed; over a vocabulary that may be split over the tp axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.train.comm import Axis

IGNORE = -100  # target of positions that do not count


def summed_loss(logits: Tensor, targets: Tensor, tp: Axis) -> Tensor:
    """Sum of -log p(target) in nats over valid targets, a scalar in fp32, equal on all tp ranks.

    `logits` [batch, seq, vocab/tp] holds this rank's slice of the vocabulary, `targets`
    [batch, seq] token ids or `IGNORE`. The caller divides by the number of valid targets of the
    whole step, so that a token weighs the same on every rank and in every micro-batch.
    """
    flat, labels = logits.flatten(0, 1).float(), targets.flatten()
    if tp.size == 1:
        return F.cross_entropy(flat, labels, reduction="sum", ignore_index=IGNORE)
    split: Any = _SplitVocabularyLoss
    loss: Tensor = split.apply(flat, labels, tp)
    return loss


def count_valid(targets: Tensor) -> int:
    """Number of targets that count."""
    return int((targets != IGNORE).sum())


class _SplitVocabularyLoss(torch.autograd.Function):
    """Cross-entropy without gathering the logits. Source: arXiv 1909.08053, section 3."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: Axis) -> Tensor:
        peak = logits.amax(dim=-1)
        tp.all_reduce_max(peak)
        shifted = logits - peak[:, None]
        local = labels - tp.index * logits.shape[-1]
        absent = (local < 0) | (local >= logits.shape[-1])
        column = local.masked_fill(absent, 0)[:, None]
        found = shifted.gather(1, column).squeeze(1).masked_fill(absent, 0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(dim=-1), found))
        tp.all_reduce(sums)
        total, target = sums
        valid = labels != IGNORE
        ctx.save_for_backward(exponentials, total, column, absent, valid)
        loss: Tensor = ((total.log() - target) * valid).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        exponentials, total, column, absent, valid = ctx.saved_tensors
        grad = exponentials / total[:, None]
        present = (~absent).to(grad.dtype)[:, None]
        grad.scatter_add_(1, column, -present)
        return grad * (valid * grads[0])[:, None], None, None
