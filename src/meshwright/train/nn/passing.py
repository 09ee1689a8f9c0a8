"""What one forward pass is about: which tokens, and what may be counted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshwright.train.nn.dropout import Draws

Tables = tuple[Tensor, Tensor] | None


@dataclass
class Pass:
    """Handed from layer to layer with the activations of one micro-batch.

    `rope`: fp32 cosine and sine of this rank's tokens, each [seq, dim] or [batch, seq, dim].
    `order`: int64 [seq], the place in the whole sequence of each of this context-parallel rank's
    tokens. `documents`: int64 [batch, whole seq], the document of each token of the whole sequence,
    None where all are one; `places`: int64 [batch, seq], the place of this rank's tokens in their
    documents. In `training` routers count loads and add penalties, but not while
    `recomputing`, when a layer is run again for its activations. Gradients of the loss are scaled
    by `loss_scale`. `penalty` sums router losses over tokens, detached. `draws` says what dropout
    drops; None: nothing.
    """

    rope: Tables
    order: Tensor
    documents: Tensor | None = None
    places: Tensor | None = None
    training: bool = True
    recomputing: bool = False
    loss_scale: float = 1.0
    penalty: Tensor | None = None
    draws: Draws | None = None

    @property
    def counting(self) -> bool:
        """Whether this run of a layer is the one that counts."""
        return self.training and not self.recomputing

    def add_penalty(self, amount: Tensor) -> None:
        """Report a router loss, summed over tokens."""
        amount = amount.detach()
        self.penalty = amount if self.penalty is None else self.penalty + amount
