"""What is trained, apart from how it is laid out: the same for all candidates of one question."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from meshwright.models.spec import ModelSpec

if TYPE_CHECKING:
    from meshwright.plan.cost.framework import Framework

Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]


@dataclass(frozen=True)
class Workload:
    """A model, its batch, the framework that trains it, and the assumptions about its data.

    `imbalance` is the load of the fullest expert rank over the mean (1: forced balance).
    `attention_share` scales the scores that are computed, e.g. below 1 where a sequence is packed
    from several documents or attention slides. `causal` halves them where attention is flash.
    `optimizer_bytes` is the state of one parameter, apart from its master copy (Adam: 8 bytes).
    """

    spec: ModelSpec
    seq_len: int
    global_batch: int
    precision: Precision
    framework: Framework
    optimizer_bytes: float = 8.0
    flash_attention: bool = True
    causal: bool = True
    attention_share: float = 1.0
    imbalance: float = 1.0

    @cached_property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return sum(self.spec.is_moe(layer) for layer in range(self.spec.layers))

    @property
    def dense_layers(self) -> int:
        """Layers without routed experts."""
        return self.spec.layers - self.moe_layers

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq_len

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward half: 3 where it is gated (gate, up, down), else 2."""
        return 2 if self.spec.family == "gpt2" else 3
