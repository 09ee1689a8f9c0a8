"""Attention of some queries to some keys, made to be added up with other blocks of the same rows.

A block returns its normalised output and the log of the sum of its exponentials. From those the
output over several blocks follows exactly, and the gradient of each block needs only the log-sum of
the whole row. Sums are fp32 whatever the inputs are. Sources: arXiv 2205.14135 and 2307.08691.

Shapes: q [batch, heads, rows, dim], k [batch, kv heads, columns, dim], v [batch, kv heads, columns,
v dim]; log-sums fp32 [batch, heads, rows]. Heads are a multiple of kv heads, in groups of
neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ROWS = 64  # of one tile of scores: stays in the cache, and bounds what a long block needs
_FUSED_DIM = 256  # largest head of the fused kernel, which also wants a multiple of 8


@dataclass(frozen=True)
class Mask:
    """Which columns a row sees: with `causal` (a square block) those up to its own, and of
    `documents` of the rows and of the columns, each [batch, n], those that are the same."""

    causal: bool = False
    documents: tuple[Tensor, Tensor] | None = None

    def hide(self, scores: Tensor, first_row: int) -> None:
        """Set unseen `scores` [batch, kv heads, group, rows, columns] to -inf; the rows are those
        of the block from `first_row`, the columns its first ones."""
        rows, columns = scores.shape[-2:]
        if self.causal:
            seen = torch.ones(rows, columns, dtype=torch.bool, device=scores.device)
            scores.masked_fill_(seen.triu(1 + first_row), float("-inf"))
        if self.documents is not None:
            of_rows, of_columns = self.documents
            of_rows = of_rows[:, first_row : first_row + rows, None]
            other = of_rows != of_columns[:, None, :columns]
            scores.masked_fill_(other[:, None, None], float("-inf"))


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """fp32 output [batch, heads, rows, v dim] of the block alone, and its log-sum.

    A row that sees nothing has output 0 and log-sum -inf.
    """
    if _fused(q, v, mask):
        return _fused_forward(q, k, v, mask, scale)
    k, v = k.float(), v.float()
    outputs, log_sums = [], []
    for tile in _tiles(q, k, mask):
        scores = _scores(tile, k, mask, scale)
        # Finite where a row sees nothing, so that its exponentials are 0 and not nan.
        peak = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
        weights = scores.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        log_sums.append((peak + total.log()).squeeze(-1))
        # The peak itself counts 1, so only an empty sum is less.
        mixed = weights.flatten(2, 3) @ v[:, :, : tile.columns]
        outputs.append(mixed.view(*total.shape[:-1], -1).div_(total.clamp_min(1.0)))
    return torch.cat(outputs, dim=3).flatten(1, 2), torch.cat(log_sums, dim=3).flatten(1, 2)


def attend_block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    mask: Mask,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the block adds to the gradients of q, k and v.

    `out` and `log_sum` are those of the rows over all blocks, `grad` is the gradient of that `out`.
    """
    if _fused(q, v, mask):
        return _fused_backward(grad, q, k, v, out, log_sum, mask, scale)
    k, v = k.float(), v.float()
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    groups = (k.shape[1], -1)
    grad, log_sum = grad.float().unflatten(1, groups), log_sum.unflatten(1, groups)
    inner = (grad * out.unflatten(1, groups)).sum(-1)
    dqs = []
    for tile in _tiles(q, k, mask):
        rows, columns = slice(tile.first, tile.first + tile.q.shape[3]), slice(tile.columns)
        weights = _scores(tile, k, mask, scale).sub_(log_sum[..., rows, None]).exp_()
        grad_rows = grad[..., rows, :].flatten(2, 3)
        dv[:, :, columns] += weights.flatten(2, 3).mT @ grad_rows
        dweights = (grad_rows @ v[:, :, columns].mT).view_as(weights)
        dscores = dweights.sub_(inner[..., rows, None]).mul_(weights).mul_(scale).flatten(2, 3)
        dqs.append((dscores @ k[:, :, columns]).view_as(tile.q))
        dk[:, :, columns] += dscores.mT @ tile.q.flatten(2, 3)
    return torch.cat(dqs, dim=3).flatten(1, 2), dk, dv


@dataclass(frozen=True)
class _Tile:
    """Rows of a block from `first` on, fp32 [batch, kv heads, group, rows, dim], and how many of
    the columns any of them sees."""

    q: Tensor
    first: int
    columns: int


def _tiles(q: Tensor, k: Tensor, mask: Mask) -> Iterator[_Tile]:
    grouped = q.unflatten(1, (k.shape[1], -1))
    for first in range(0, q.shape[2], _ROWS):
        tile = grouped[..., first : first + _ROWS, :].float()
        yield _Tile(tile, first, first + tile.shape[3] if mask.causal else k.shape[2])


def _scores(tile: _Tile, k: Tensor, mask: Mask, scale: float) -> Tensor:
    """Masked scores, fp32 [batch, kv heads, group, rows, columns]: a group shares its keys, which
    are not copied for it."""
    scores = (tile.q.flatten(2, 3) * scale) @ k[:, :, : tile.columns].mT
    scores = scores.view(*tile.q.shape[:-1], -1)
    mask.hide(scores, tile.first)
    return scores


def _fused(q: Tensor, v: Tensor, mask: Mask) -> bool:
    """Whether torch's fused kernel of this device takes the block; where a row sees nothing the
    CPU's gives no log-sum, so documents are never its work."""
    dim = q.shape[-1]
    if mask.documents is not None or dim != v.shape[-1]:
        return False
    half = q.dtype in (torch.bfloat16, torch.float16)
    on_gpu = q.is_cuda and half and dim % 8 == 0 and dim <= _FUSED_DIM
    return on_gpu or q.device.type == "cpu"


def _fused_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    ops, dropout = torch.ops.aten, 0.0
    if q.device.type == "cpu":
        attend = ops._scaled_dot_product_flash_attention_for_cpu
    else:
        attend = ops._scaled_dot_product_flash_attention
    out, log_sum, *_ = attend(q, k, v, dropout, mask.causal, scale=scale)
    return out.float(), log_sum


def _fused_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    mask: Mask,
    scale: float,
) -> tuple[Any, ...]:
    ops, dropout = torch.ops.aten, 0.0
    # The kernels read these by address, without regard to strides.
    read = (grad.contiguous(), q, k, v, out.contiguous(), log_sum.contiguous())
    if q.device.type == "cpu":
        attend_backward = ops._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(attend_backward(*read, dropout, mask.causal, scale=scale))
    lengths = (None, None, q.shape[2], k.shape[2])
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of the dropout that there is not
    attend_backward = ops._scaled_dot_product_flash_attention_backward
    return tuple(attend_backward(*read, *lengths, dropout, mask.causal, seed, seed, scale=scale))
