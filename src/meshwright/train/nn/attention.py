"""Attention: grouped-query with optional norms of queries and keys, and multi-head latent.

Both have the same seams. `enter` and `leave` bound what a tp group shares; `attend` takes queries,
keys and values to mixed values, and context parallelism puts its own there; `rotate` turns heads to
their positions. Head counts are read from the weights, so a module serves a tensor-parallel slice
of itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.spec import ModelSpec
from meshwright.train.nn.boundary import Boundary, stay
from meshwright.train.nn.linear import Linear
from meshwright.train.nn.norm import RMSNorm
from meshwright.train.nn.passing import Pass
from meshwright.train.nn.rope import rotate

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]

LATENT_NORM_EPS = 1e-6  # of the norms of the latents, whatever `norm_eps` says: DeepSeek's own code


def attend_whole(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float) -> Tensor:
    """Causal attention where this rank has the whole sequence.

    q [batch, heads, seq, dim], k [batch, kv heads, seq, dim] and v [batch, kv heads, seq, v dim] to
    [batch, heads, seq, v dim]; softmax(scale * q k) within each of `documents` [batch, seq].
    """
    grouped = q.shape[1] != k.shape[1]
    if documents is None:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
    same = documents[:, None, :, None] == documents[:, None, None, :]
    if grouped and q.is_cuda:  # its one fused kernel with a mask takes as many keys as queries
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=same.tril(), scale=scale, enable_gqa=grouped
    )


def build_attention(spec: ModelSpec) -> Attention | LatentAttention:
    """The attention of the model."""
    return LatentAttention(spec) if spec.latent_attention else Attention(spec)


class Attention(nn.Module):
    """Causal grouped-query attention. Input and output [batch, seq, hidden]. arXiv 2305.13245.

    Where the family has `qk_norm`, each query and key head is normalised before it is rotated.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        bias = spec.family == "gpt2"
        self.head_dim = spec.head_dim
        self.scale = spec.attention_scale
        self.wq = Linear(spec.hidden, spec.query_dim, bias)
        self.wk = Linear(spec.hidden, spec.kv_dim, bias)
        self.wv = Linear(spec.hidden, spec.kv_dim, bias)
        self.wo = Linear(spec.query_dim, spec.hidden, bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.enter: Boundary = stay
        self.leave: Boundary = stay
        self.attend: Attend = attend_whole
        self.rotate: Rotate = rotate

    def forward(self, x: Tensor, about: Pass) -> Tensor:
        x = self.enter(x)
        q, k, v = (_heads(project(x), self.head_dim) for project in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if about.rope is not None:
            q, k = self.rotate(q, *about.rope), self.rotate(k, *about.rope)
        mixed = self.attend(q, k, v, about.documents, self.scale)
        return self.wo.add_bias(self.leave(self.wo.product(_merge(mixed))))


class LatentAttention(nn.Module):
    """Multi-head latent attention. Input and output [batch, seq, hidden].

    Queries and, together, keys and values are projected down to latents, normalised, and projected
    up to heads; one rotary key serves all heads. The latents are made outside the region that a tp
    group shares, so what enters it is small. Without `q_lora_rank` queries are not compressed.
    Source: arXiv 2405.04434, section 2.1.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim, self.value_dim = spec.head_dim, spec.value_head_dim
        self.rope_dim, self.kv_rank = spec.rope_dim, spec.kv_lora_rank
        self.plain_dim = spec.head_dim - spec.rope_dim
        self.scale = spec.attention_scale
        rank = spec.q_lora_rank
        if rank:
            self.wq_down = Linear(spec.hidden, rank)
            self.q_down_norm = RMSNorm(rank, LATENT_NORM_EPS)
            self.wq_up = Linear(rank, spec.query_dim)
        else:
            self.wq = Linear(spec.hidden, spec.query_dim)
        self.compressed_queries = rank > 0
        self.wkv_down = Linear(spec.hidden, self.kv_rank + self.rope_dim)
        self.kv_down_norm = RMSNorm(self.kv_rank, LATENT_NORM_EPS)
        self.wkv_up = Linear(self.kv_rank, spec.heads * (self.plain_dim + self.value_dim))
        self.wo = Linear(spec.value_dim, spec.hidden)
        self.enter: Boundary = stay
        self.leave: Boundary = stay
        self.attend: Attend = attend_whole
        self.rotate: Rotate = rotate

    def forward(self, x: Tensor, about: Pass) -> Tensor:
        queries, latent, shared_key = self._enter_latents(x)
        q = _heads(self._queries_up(queries), self.head_dim)
        keys_values = _heads(self.wkv_up(latent), self.plain_dim + self.value_dim)
        k, v = keys_values.split((self.plain_dim, self.value_dim), dim=-1)
        q_plain, q_rope = q.split((self.plain_dim, self.rope_dim), dim=-1)
        k_rope = shared_key[:, None]
        if about.rope is not None:
            q_rope = self.rotate(q_rope, *about.rope)
            k_rope = self.rotate(k_rope, *about.rope)
        q = torch.cat((q_plain, q_rope), dim=-1)
        k = torch.cat((k, k_rope.expand(-1, k.shape[1], -1, -1)), dim=-1)
        mixed = self.attend(q, k, v, about.documents, self.scale)
        return self.leave(self.wo.product(_merge(mixed)))

    def _enter_latents(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query latent (x itself where queries are not compressed), key-value latent and rotary
        key, in the shared region by a single collective."""
        down: Tensor = self.wkv_down(x)
        latent, shared_key = down.split((self.kv_rank, self.rope_dim), dim=-1)
        queries = self.q_down_norm(self.wq_down(x)) if self.compressed_queries else x
        parts = (queries, self.kv_down_norm(latent), shared_key)
        widths = [part.shape[-1] for part in parts]
        return torch.split(self.enter(torch.cat(parts, dim=-1)), widths, dim=-1)

    def _queries_up(self, queries: Tensor) -> Tensor:
        up: Tensor = (self.wq_up if self.compressed_queries else self.wq)(queries)
        return up


def _heads(x: Tensor, dim: int) -> Tensor:
    """[batch, seq, n * dim] as [batch, n, seq, dim]."""
    heads: Tensor = x.unflatten(-1, (-1, dim)).transpose(1, 2)
    return heads


def _merge(x: Tensor) -> Tensor:
    """[batch, n, seq, dim] as [batch, seq, n * dim]."""
    return x.transpose(1, 2).flatten(2)
