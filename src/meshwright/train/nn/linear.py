"""A linear layer whose bias is added apart from the product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x @ weight.T + bias. Input [..., n_in], output [..., n_out]; weight [n_out, n_in].

    Shapes are read from the weight, so the same module serves a tensor-parallel slice.
    """

    def __init__(self, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """Only x @ weight.T: a partial sum when `weight` is a slice of the input axis."""
        return F.linear(x, self.weight)

    def add_bias(self, x: Tensor) -> Tensor:
        """The bias alone, once the partial sums have been added up."""
        return x if self.bias is None else x + self.bias
