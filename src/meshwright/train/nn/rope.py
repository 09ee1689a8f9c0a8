"""Rotary positions: tables in fp64, cast once.

bf16 holds integers exactly only up to 256, and even fp32 phases drift by 2e-3 at position 131,071;
so positions, inverse frequencies and phases stay in fp64 and only the cosine and sine are cast.
Source: arXiv 2104.09864; the half-rotation convention of Hugging Face Llama checkpoints.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.models.spec import ModelSpec


def rope_table(spec: ModelSpec, seq_len: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position for a model with rotary positions, stretched as its
    `rope_scaling` says, fp32, each [seq_len, rope_dim]."""
    frequency = _frequencies(spec.rope_dim, spec.rope_theta)
    if spec.rope_scaling == "llama3":
        frequency = _llama3(frequency, spec)
    elif spec.rope_scaling == "yarn":
        frequency = _yarn(frequency, spec)
    return _tables(seq_len, frequency, spec.rope_gain)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [batch, heads, seq, dim] by fp32 tables [seq, dim] or, with positions
    of their own for each sequence, [batch, seq, dim].

    The products are taken in fp32; only the result has the type of `x`.
    """
    first, second = x.float().chunk(2, dim=-1)
    half = cos.shape[-1] // 2
    cos, sin = cos[..., None, :, :half], sin[..., None, :, :half]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def _frequencies(dim: int, theta: float) -> Tensor:
    """Radians a position of each pair of channels, fp64 [dim / 2]."""
    channel = torch.arange(0, dim, 2, dtype=torch.float64)
    return theta ** (-channel / dim)


def _tables(seq_len: int, frequency: Tensor, gain: float = 1.0) -> tuple[Tensor, Tensor]:
    position = torch.arange(seq_len, dtype=torch.float64)
    phase = torch.outer(position, frequency).repeat(1, 2)
    return (phase.cos() * gain).float(), (phase.sin() * gain).float()


def _llama3(frequency: Tensor, spec: ModelSpec) -> Tensor:
    """Long waves stretched by the factor, short ones kept, a linear blend (in turns of the original
    length) between. Source: Llama 3.1 reference code, `apply_scaling`."""
    turns = spec.rope_original_len * frequency / (2 * math.pi)
    low, high = spec.rope_low_freq, spec.rope_high_freq
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / spec.rope_factor)


def _yarn(frequency: Tensor, spec: ModelSpec) -> Tensor:
    """Channels that turn less than `rope_beta_slow` times over the original length are stretched by
    the factor, those above `rope_beta_fast` kept, a linear blend (in channels) between.
    Source: arXiv 2309.00071, section 3.2, bounds rounded outwards as its code does."""
    dim = spec.rope_dim

    def channel(turns: float) -> float:
        length = spec.rope_original_len / (turns * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(spec.rope_theta))

    first = max(math.floor(channel(spec.rope_beta_fast)), 0)
    last = min(math.ceil(channel(spec.rope_beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - first) / max(last - first, 1e-3)
    stretched = ramp.clamp(0, 1)
    return frequency * (1 - stretched + stretched / spec.rope_factor)
