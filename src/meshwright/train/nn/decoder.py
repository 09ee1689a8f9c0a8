"""A decoder, or the slice of one that a pipeline stage holds."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.spec import ModelSpec
from meshwright.train.nn.block import Block, Boundary, stay
from meshwright.train.nn.embed import Embedding, Head, Positions
from meshwright.train.nn.norm import build_norm
from meshwright.train.nn.rope import rope_table


class Decoder(nn.Module):
    """Layers `layers` of the model `spec`; all of them by default.

    The first slice turns tokens [batch, seq] into activations [batch, seq, hidden]; the last turns
    activations into logits [batch, seq, vocab] (a slice of the vocabulary under tensor
    parallelism). Parameter names are those of the whole model, so a tied head on a last slice that
    is not also the first holds its own copy of `embed.weight`.
    """

    def __init__(self, spec: ModelSpec, layers: range | None = None) -> None:
        super().__init__()
        layers = range(spec.layers) if layers is None else layers
        self.spec = spec
        self.first = layers.start == 0
        self.last = layers.stop == spec.layers
        self.enter_head: Boundary = stay
        self._rope: tuple[Tensor, Tensor] | None = None
        if self.first or (self.last and spec.tie_embeddings):
            self.embed = Embedding(spec.vocab, spec.hidden)
        if self.first and spec.family == "gpt2":
            self.positions = Positions(spec.max_seq_len, spec.hidden)
        self.layers = nn.ModuleDict({str(index): Block(spec) for index in layers})
        if self.last:
            self.norm = build_norm(spec)
            if not spec.tie_embeddings:
                self.head = Head(spec.vocab, spec.hidden)

    def forward(self, x: Tensor, seq_len: int | None = None) -> Tensor:
        """`seq_len` is the full length where `x` is a slice of the sequence; default x.shape[1]."""
        seq_len = x.shape[1] if seq_len is None else seq_len
        if self.first:
            x = self.embed(x)
            if self.spec.family == "gpt2":
                x = self.positions(x)
        rope = self._rope_for(seq_len, x)
        for layer in self.layers.values():
            x = layer(x, rope)
        if self.last:
            x = F.linear(self.enter_head(self.norm(x)), self.head_weight)
        return x

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden], or this rank's rows of it."""
        return self.embed.weight if self.spec.tie_embeddings else self.head.weight

    def _rope_for(self, seq_len: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.spec.family != "llama":
            return None
        if self._rope is None or self._rope[0].shape[0] < seq_len:
            cos, sin = rope_table(seq_len, self.spec.head_dim, self.spec.rope_theta)
            self._rope = cos.to(like.device), sin.to(like.device)
        cos, sin = self._rope
        return cos[:seq_len], sin[:seq_len]
