"""Next-token cross-entropy, summed; over a vocabulary that may be split over the tp axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.train.autograd import apply
from meshwright.train.comm import Axis

IGNORE = -100  # target of positions that do not count

Entropy = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log p(target) in nats over valid targets, in fp32, where this rank has all logits
    [n, vocab]."""
    return F.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=IGNORE)


def summed_loss(
    logits: Tensor, targets: Tensor, tp: Axis, entropy: Entropy = cross_entropy
) -> Tensor:
    """Sum of -log p(target) in nats over valid targets, a scalar in fp32, equal on all tp ranks.

    `logits` [batch, seq, vocab/tp] holds this rank's slice of the vocabulary, `targets`
    [batch, seq] token ids or `IGNORE`. The caller divides by the number of valid targets of the
    whole step, so that a token weighs the same on every rank and in every micro-batch. `entropy` is
    what a single tp rank computes.
    """
    flat, labels = logits.flatten(0, 1), targets.flatten()
    if tp.size == 1:
        return entropy(flat, labels)
    return apply(_SplitVocabularyLoss, flat.float(), labels, tp)


def count_valid(targets: Tensor) -> Tensor:
    """Number of targets that count, int64, where they are: to read it would wait for the chip."""
    return (targets != IGNORE).sum()


@dataclass(frozen=True)
class HeadLoss:
    """The head and the loss behind it, on `chunk` tokens at a time (0: all at once).

    In chunks, logits are made, used for their gradients and dropped before the next, so that only
    [chunk, vocab/tp] of them exist: what a large vocabulary would cost in memory it costs nothing
    in time, since the backward pass finds its work done. Source: arXiv 2410.10989, section 3.2.
    """

    tp: Axis
    chunk: int
    entropy: Entropy = cross_entropy

    def __call__(self, x: Tensor, weight: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Summed loss of hidden states [batch, seq, hidden] against `targets` [batch, seq], with
        the head `weight` [vocab/tp, hidden]. `scale` is what its gradient will be scaled by: in
        fp16 it must be in the logits' gradients from the start."""
        if self.chunk == 0 or targets.numel() <= self.chunk:
            return summed_loss(F.linear(x, weight), targets, self.tp, self.entropy)
        return apply(_ChunkedLoss, x.flatten(0, 1), weight, targets.flatten(), self, scale)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, how: HeadLoss, scale: float
    ) -> Tensor:
        needed = any(ctx.needs_input_grad)
        grad_x, total = torch.empty_like(x), x.new_zeros((), dtype=torch.float32)
        grad_w = torch.zeros(weight.shape, device=weight.device) if needed else None
        for start in range(0, len(x), how.chunk):
            rows = slice(start, start + how.chunk)
            with torch.set_grad_enabled(needed):
                logits = F.linear(x[rows], weight).requires_grad_(needed)
                loss = summed_loss(logits[None], targets[rows][None], how.tp, how.entropy)
            total += loss.detach()
            if grad_w is not None:
                (grad,) = torch.autograd.grad(loss, logits, torch.full_like(loss, scale))
                grad_x[rows] = grad @ weight
                grad_w += (grad.t() @ x[rows]).float()
        ctx.scale = scale
        ctx.save_for_backward(grad_x, None if grad_w is None else grad_w.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_x, grad_w = ctx.saved_tensors
        ratio = grads[0] / ctx.scale
        return grad_x * ratio, grad_w * ratio, None, None, None


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
