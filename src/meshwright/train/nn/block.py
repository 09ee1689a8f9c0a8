"""One layer of a decoder: attention and feed-forward, each behind a norm and a residual."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.models.spec import ModelSpec
from meshwright.plan.activations import Part, Parts
from meshwright.train.nn.attention import build_attention
from meshwright.train.nn.dropout import dropout
from meshwright.train.nn.feed_forward import GeluMLP, SwiGLU
from meshwright.train.nn.moe import MoE
from meshwright.train.nn.norm import build_norm
from meshwright.train.nn.passing import Pass
from meshwright.train.recompute import recomputed


class Block(nn.Module):
    """Pre-norm layer number `layer`. Input and output [batch, seq, hidden].

    The parts named in `recompute` keep only their input for the backward pass and are run again
    there; with both, the layer keeps only its own input. `both`, `attention` and `feed_forward`, of
    which a pass runs the largest that it can, may be replaced by compiled ones.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self._rate, self._layer = spec.dropout, layer
        self.attn_norm = build_norm(spec)
        self.attn = build_attention(spec)
        self.mlp_norm = build_norm(spec)
        self.mlp = _feed_forward(spec, layer)
        self.recompute: Parts = frozenset()

    def forward(self, x: Tensor, about: Pass) -> Tensor:
        if len(self.recompute) == 2:
            return recomputed(self.both, x, about)
        if not self.recompute:
            return self.both(x, about)
        for part, run in (("attention", self.attention), ("mlp", self.feed_forward)):
            x = recomputed(run, x, about) if part in self.recompute else run(x, about)
        return x

    def both(self, x: Tensor, about: Pass) -> Tensor:
        """The whole layer."""
        return self.feed_forward(self.attention(x, about), about)

    def attention(self, x: Tensor, about: Pass) -> Tensor:
        """The layer's first half, with its residual."""
        return x + self._dropped(self.attn(self.attn_norm(x), about), about, "attention")

    def feed_forward(self, x: Tensor, about: Pass) -> Tensor:
        """The layer's second half, with its residual."""
        return x + self._dropped(self.mlp(self.mlp_norm(x), about), about, "mlp")

    def _dropped(self, added: Tensor, about: Pass, part: Part) -> Tensor:
        if self._rate == 0:  # without a look at the layer's number: else each is compiled anew
            return added
        return dropout(added, about, self._rate, f"{self._layer}/{part}")


def _feed_forward(spec: ModelSpec, layer: int) -> nn.Module:
    if spec.is_moe(layer):
        return MoE(spec)
    kind = GeluMLP if spec.family == "gpt2" else SwiGLU
    return kind(spec.hidden, spec.ffn_hidden)
