"""Normalisation over the last axis, computed in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.spec import ModelSpec


class RMSNorm(nn.Module):
    """x / rms(x) * weight. Input and output [..., dim]. Source: arXiv 1910.07467."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias. Input and output [..., dim]."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def build_norm(spec: ModelSpec) -> nn.Module:
    """The norm of the model's family."""
    kind = LayerNorm if spec.family == "gpt2" else RMSNorm
    return kind(spec.hidden, spec.norm_eps)
