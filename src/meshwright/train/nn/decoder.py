"""A decoder, or the slice of one that a pipeline stage holds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.spec import ModelSpec
from meshwright.train.nn.block import Block
from meshwright.train.nn.boundary import Boundary, stay
from meshwright.train.nn.embed import Embedding, Head, Positions
from meshwright.train.nn.norm import build_norm
from meshwright.train.nn.passing import Pass, Tables
from meshwright.train.nn.rope import rope_table


class Decoder(nn.Module):
    """Layers `layers` of the model `spec`; all of them by default.

    The first slice turns tokens [batch, seq] into activations [batch, seq, hidden]; the last
    returns them normalised, ready for the head. `first` and `last` say which ends this slice is,
    for slices without layers of their own. Parameter names are those of the whole model, so a tied
    head on a last slice that is not also the first holds its own copy of `embed.weight`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: range | None = None,
        first: bool | None = None,
        last: bool | None = None,
    ) -> None:
        super().__init__()
        layers = range(spec.layers) if layers is None else layers
        self.spec = spec
        self.first = layers.start == 0 if first is None else first
        self.last = layers.stop == spec.layers if last is None else last
        self.enter_head: Boundary = stay
        self._rope: Tables = None
        if self.first or (self.last and spec.tie_embeddings):
            self.embed = Embedding(spec.vocab, spec.hidden)
        if self.first and spec.family == "gpt2":
            self.positions = Positions(spec.max_seq_len, spec.hidden)
        self.layers = nn.ModuleDict({str(index): Block(spec, index) for index in layers})
        if self.last:
            self.norm = build_norm(spec)
            if not spec.tie_embeddings:
                self.head = Head(spec.vocab, spec.hidden)

    def forward(self, x: Tensor, about: Pass) -> Tensor:
        if self.first:
            x = self.embed(x)
            if self.spec.family == "gpt2":
                x = self.positions(x, about)
        for layer in self.layers.values():
            x = layer(x, about)
        return self.enter_head(self.norm(x)) if self.last else x

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [batch, seq, vocab] of whole sequences of tokens [batch, seq], for a slice that
        is the whole model."""
        order = torch.arange(tokens.shape[1], device=tokens.device)
        self.reach(tokens.shape[1], tokens.device)
        about = Pass(self.rope_at(order), order, training=False)
        return F.linear(self(tokens, about), self.head_weight)

    @property
    def blocks(self) -> dict[int, Block]:
        """The layers of this slice by number."""
        return {int(i): block for i, block in self.layers.items() if isinstance(block, Block)}

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden], or this rank's rows of it."""
        return self.embed.weight if self.spec.tie_embeddings else self.head.weight

    def reach(self, length: int, device: torch.device) -> None:
        """From now on there are rotary positions for sequences of `length` tokens, on `device`."""
        if self.spec.family != "gpt2" and (self._rope is None or len(self._rope[0]) < length):
            cos, sin = rope_table(self.spec, length)
            self._rope = cos.to(device), sin.to(device)

    def rope_at(self, places: Tensor) -> Tables:
        """Cosine and sine at `places` (int64, any shape), all within `reach`; None without rotary
        positions."""
        if self._rope is None:
            return None
        cos, sin = self._rope
        return cos[places], sin[places]
