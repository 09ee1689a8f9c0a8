"""One layer of a decoder: attention and feed-forward, each behind a norm and a residual.

`enter` and `leave` mark where activations go from "every rank of the tp group has the same (or a
slice of the sequence)" to "each rank works on its own heads or channels" and back. On one rank they
do nothing; `train/parallel/tensor.py` puts the collectives there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.spec import ModelSpec
from meshwright.train.nn.linear import Linear
from meshwright.train.nn.norm import build_norm
from meshwright.train.nn.rope import rotate

Boundary = Callable[[Tensor], Tensor]
Tables = tuple[Tensor, Tensor] | None


def stay(x: Tensor) -> Tensor:
    """The boundary of a single rank."""
    return x


class Attention(nn.Module):
    """Causal grouped-query attention. Input and output [batch, seq, hidden]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        bias = spec.family == "gpt2"
        self.head_dim = spec.head_dim
        self.wq = Linear(spec.hidden, spec.query_dim, bias)
        self.wk = Linear(spec.hidden, spec.kv_dim, bias)
        self.wv = Linear(spec.hidden, spec.kv_dim, bias)
        self.wo = Linear(spec.query_dim, spec.hidden, bias)
        self.enter: Boundary = stay
        self.leave: Boundary = stay

    def forward(self, x: Tensor, rope: Tables) -> Tensor:
        x = self.enter(x)
        q, k, v = (self._heads(project(x)) for project in (self.wq, self.wk, self.wv))
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        merged = mixed.transpose(1, 2).flatten(2)
        return self.wo.add_bias(self.leave(self.wo.product(merged)))

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, seq, n * head_dim] as [batch, n, seq, head_dim]."""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)). Input and output [batch, seq, hidden]. arXiv 2002.05202."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = Linear(spec.hidden, spec.ffn_hidden, bias=False)
        self.up = Linear(spec.hidden, spec.ffn_hidden, bias=False)
        self.down = Linear(spec.ffn_hidden, spec.hidden, bias=False)
        self.enter: Boundary = stay
        self.leave: Boundary = stay

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave(self.down.product(F.silu(self.gate(x)) * self.up(x)))


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with biases, tanh form as GPT-2. Input and output [batch, seq, hidden]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = Linear(spec.hidden, spec.ffn_hidden, bias=True)
        self.down = Linear(spec.ffn_hidden, spec.hidden, bias=True)
        self.enter: Boundary = stay
        self.leave: Boundary = stay

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.enter(x)), approximate="tanh")
        return self.down.add_bias(self.leave(self.down.product(hidden)))


class Block(nn.Module):
    """One pre-norm layer. Input and output [batch, seq, hidden]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attn_norm = build_norm(spec)
        self.attn = Attention(spec)
        self.mlp_norm = build_norm(spec)
        self.mlp = SwiGLU(spec) if spec.family == "llama" else GeluMLP(spec)

    def forward(self, x: Tensor, rope: Tables) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rope)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out
