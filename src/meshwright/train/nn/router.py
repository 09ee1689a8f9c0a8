"""The router of a mixture of experts: where a token goes, with what weight, at what loss.

Every loss is a sum over tokens of terms whose other factors take no gradient, so the losses of any
parts of a step's tokens add up to that of the whole, on any number of ranks and micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.spec import ModelSpec
from meshwright.train.autograd import apply
from meshwright.train.comm import Axis
from meshwright.train.nn.passing import Pass


@dataclass(frozen=True)
class Route:
    """Where tokens go. `experts` int64 [batch, seq, top_k], the best first; `weights` fp32 alike.

    `kept` (bool alike) says which choices their expert has room for; None: all.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor | None


class Router(nn.Module):
    """Scores tokens x [batch, seq, hidden] by weight [experts, hidden], in fp32 throughout.

    Softmax gate with renormalisation as Mixtral and Qwen3-MoE; sigmoid gate, bias and choice of
    groups as DeepSeek-V3 (arXiv 2412.19437). Equal scores: the expert of the lower index.

    State that is no parameter: `bias` fp32 [experts], added for the choice alone (arXiv
    2408.15664); `load` fp32 [experts], the share of assignments of each expert over the global
    batch of the step before; `counts` int64 [experts], assignments of this rank's tokens so far in
    this step, dropped ones included.

    `sequence` is the axis whose ranks hold parts of the same sequences, tp slices varying fastest.
    `copies` is the number of ranks that route the same tokens and whose gradients are added up.
    """

    bias: Tensor
    load: Tensor
    counts: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        n = spec.n_experts
        self.weight = nn.Parameter(torch.empty(n, spec.hidden))
        self.sequence: Axis | None = None
        self.copies = 1
        # On a named device: a model whose weights are still to be made has this state already.
        here = torch.device("cpu")
        self.register_buffer("bias", torch.zeros(n, device=here), persistent=False)
        self.register_buffer("load", torch.full((n,), 1 / n, device=here), persistent=False)
        counts = torch.zeros(n, dtype=torch.int64, device=here)
        self.register_buffer("counts", counts, persistent=False)

    def forward(self, x: Tensor, about: Pass) -> Route:
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(-1) if self.spec.gate == "softmax" else logits.sigmoid()
        experts = self._choose(scores.detach())
        weights = scores.gather(-1, experts)
        if self.spec.norm_top_k:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * self.spec.routed_scaling
        if about.counting:
            self.counts += tally(experts.flatten(), self.spec.n_experts)
        penalty = self._penalty(logits, scores) if about.training else None
        if penalty is not None:
            if about.counting:
                about.add_penalty(penalty / self.copies)
            weights = charge(weights, penalty, about.loss_scale / self.copies)
        return Route(experts, weights, self._with_room(experts, about))

    def end_step(self, counts: Tensor) -> None:
        """Take in `counts` [experts], assignments over the global batch, and count from zero again.

        They become the `load` of the next step, and the bias of an expert with fewer than the mean
        rises by the update rate, of one with more falls. Every rank must be given the same.
        """
        counts = counts.to(self.load.device)
        self.load.copy_(counts / counts.sum().clamp_min(1))
        below = torch.sign(counts.sum() - counts * self.spec.n_experts)
        self.bias.add_(below, alpha=self.spec.bias_update_rate)
        self.counts.zero_()

    def _choose(self, scores: Tensor) -> Tensor:
        """The top_k experts of each token by biased score, within its best groups."""
        spec, biased = self.spec, scores + self.bias
        if spec.top_k_groups < spec.expert_groups:
            grouped = biased.unflatten(-1, (spec.expert_groups, -1))
            # DeepSeek-V3 adds up a group's two best, DeepSeek-V2 (softmax) takes the best.
            best = min(2 if spec.gate == "sigmoid" else 1, grouped.shape[-1])
            group_scores = grouped.topk(best).values.sum(-1)
            closed = torch.ones_like(group_scores, dtype=torch.bool)
            closed.scatter_(-1, _highest(group_scores, spec.top_k_groups), False)
            biased = grouped.masked_fill(closed[..., None], -math.inf).flatten(-2)
        return _highest(biased, spec.top_k)

    def _penalty(self, logits: Tensor, scores: Tensor) -> Tensor | None:
        """The sum of all router losses over this rank's tokens; None without any."""
        spec, parts = self.spec, []
        if spec.z_loss:  # arXiv 2202.08906, eq. 5
            parts.append(spec.z_loss * logits.logsumexp(-1).square().sum())
        if spec.aux_loss or spec.seq_aux_loss:
            shares = scores / scores.sum(-1, keepdim=True)
            if spec.aux_loss:  # arXiv 2101.03961, eq. 4, with the counts of the step before
                balance = (shares.sum((0, 1)) * self.load).sum()
                parts.append(spec.aux_loss * spec.n_experts * balance)
            if spec.seq_aux_loss:  # arXiv 2412.19437, eq. 17-20
                balance = (shares.sum(1) * self._sequence_load(scores.detach())).sum()
                parts.append(spec.seq_aux_loss * spec.n_experts * balance)
        return torch.stack(parts).sum() if parts else None

    def _sequence_load(self, scores: Tensor) -> Tensor:
        """Share of each expert in the unbiased choices of each whole sequence, [batch, experts]."""
        chosen = _highest(scores, self.spec.top_k).flatten(1)
        counts = scores.new_zeros(scores.shape[0], scores.shape[2])
        counts.scatter_add_(1, chosen, scores.new_ones(()).expand(chosen.shape))
        if self.sequence is not None:
            self.sequence.all_reduce(counts)
        return counts / counts.sum(-1, keepdim=True)

    def _with_room(self, experts: Tensor, about: Pass) -> Tensor | None:
        """Which choices are among the first ceil(capacity_factor * S * top_k / experts) of their
        expert within their whole sequence of S tokens.

        So what is dropped depends on the sequence alone, not on the batch or the layout.
        """
        spec = self.spec
        if not spec.capacity_factor:
            return None
        own = self._own_order(experts.shape[1], about)
        whole = self._whole_sequence(experts, own)
        batch, seq, _ = whole.shape
        room = math.ceil(spec.capacity_factor * seq * spec.top_k / spec.n_experts)
        taken = torch.zeros(batch, seq, spec.n_experts, dtype=torch.int32, device=whole.device)
        taken = taken.scatter_(2, whole, 1).cumsum(1)
        return (taken.gather(2, whole) <= room)[:, own]

    def _own_order(self, seq: int, about: Pass) -> Tensor:
        """Places in the whole sequence of this rank's `seq` tokens: a tp slice of `about.order`."""
        slices = about.order.shape[0] // seq
        index = self.sequence.index % slices if self.sequence is not None else 0
        return about.order[index * seq : (index + 1) * seq]

    def _whole_sequence(self, experts: Tensor, own: Tensor) -> Tensor:
        """The choices [batch, whole seq, top_k] of all ranks of the sequence, in its order."""
        if self.sequence is not None and self.sequence.size > 1:
            n, mine = self.sequence.size, experts
            gathered = mine.new_empty(n * mine.shape[0], *mine.shape[1:])
            self.sequence.all_gather(gathered, mine.contiguous())
            experts = gathered.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)
            order = own.new_empty(n * own.shape[0])
            self.sequence.all_gather(order, own.contiguous())
            own = order
        whole = torch.empty_like(experts)
        whole[:, own] = experts
        return whole


def tally(groups: Tensor, n: int) -> Tensor:
    """How often each of 0 to `n` - 1 is in `groups`, int64 [n]: `torch.bincount`, which on a GPU
    makes the CPU wait for the largest number."""
    counts = groups.new_zeros(n)
    return counts.scatter_add_(0, groups, torch.ones_like(groups))


def charge(x: Tensor, penalty: Tensor, scale: float) -> Tensor:
    """`x` itself; when a gradient comes back through it, `penalty` (a scalar) gets `scale`.

    So a loss made inside a layer reaches its parameters without travelling to the end of the
    model. The result must be used in place of `x`.
    """
    return apply(_Charge, x, penalty, scale)


class _Charge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, penalty: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(penalty)
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (penalty,) = ctx.saved_tensors
        return grads[0], torch.full_like(penalty, ctx.scale), None


def _highest(scores: Tensor, k: int) -> Tensor:
    """Indices of the k highest along the last axis; of equals the lower index first."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]
