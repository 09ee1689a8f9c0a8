"""Rotary positions: tables in fp64, cast once.

bf16 holds integers exactly only up to 256, and even fp32 phases drift by 2e-3 at position 131,071;
so positions, inverse frequencies and phases stay in fp64 and only the cosine and sine are cast.
Source: arXiv 2104.09864; the half-rotation convention of Hugging Face Llama checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and channel, fp32, each [seq_len, head_dim]."""
    channel = torch.arange(0, head_dim, 2, dtype=torch.float64)
    inverse_frequency = theta ** (-channel / head_dim)
    position = torch.arange(seq_len, dtype=torch.float64)
    phase = torch.outer(position, inverse_frequency).repeat(1, 2)
    return phase.cos().float(), phase.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [batch, heads, seq, head_dim] by fp32 tables [seq, head_dim].

    The products are taken in fp32; only the result has the type of `x`.
    """
    first, second = x.float().chunk(2, dim=-1)
    half = cos.shape[-1] // 2
    cos, sin = cos[:, :half], sin[:, :half]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
