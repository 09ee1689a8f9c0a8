"""The dense feed-forward halves of a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.train.nn.boundary import Boundary, stay
from meshwright.train.nn.linear import Linear
from meshwright.train.nn.passing import Pass


def gate_by_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)). Input and output [batch, seq, hidden]. arXiv 2002.05202.

    `gated` does what stands between the products.
    """

    def __init__(self, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.gate = Linear(hidden, ffn_hidden)
        self.up = Linear(hidden, ffn_hidden)
        self.down = Linear(ffn_hidden, hidden)
        self.enter: Boundary = stay
        self.leave: Boundary = stay
        self.gated: Callable[[Tensor, Tensor], Tensor] = gate_by_silu

    def forward(self, x: Tensor, _about: Pass) -> Tensor:
        x = self.enter(x)
        return self.leave(self.down.product(self.gated(self.gate(x), self.up(x))))


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with biases, tanh form as GPT-2. Input and output [batch, seq, hidden]."""

    def __init__(self, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.up = Linear(hidden, ffn_hidden, bias=True)
        self.down = Linear(ffn_hidden, hidden, bias=True)
        self.enter: Boundary = stay
        self.leave: Boundary = stay

    def forward(self, x: Tensor, _about: Pass) -> Tensor:
        hidden = F.gelu(self.up(self.enter(x)), approximate="tanh")
        return self.down.add_bias(self.leave(self.down.product(hidden)))
