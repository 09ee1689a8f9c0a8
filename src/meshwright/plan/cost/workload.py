"""What is trained, apart from how it is laid out: the same for all candidates of one question."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from meshwright.models.spec import ModelSpec

if TYPE_CHECKING:
    from meshwright.plan.cost.framework import Framework

SHORT_VOCAB = 65_500  # below it the stores of Megatron-LM, and ours, take 2 bytes a token

Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]


@dataclass(frozen=True)
class Workload:
    """A model, its batch, the framework that trains it, and the assumptions about its data.

    `imbalance` is the load of the fullest expert rank over the mean (1: forced balance).
    `attention_share` scales the scores that are computed, e.g. below 1 where a sequence is packed
    from several documents or attention slides. `causal` halves them where attention is flash.
    `optimizer_bytes` is the state of one parameter, apart from its master copy (Adam: 8 bytes).
    `trained` is off where the model is frozen: forward only, no gradients, no optimizer.
    `sample_bytes` is what a sequence takes on storage; None: its tokens, see `token_bytes`.
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
    trained: bool = True
    sample_bytes: float | None = None

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
    def token_bytes(self) -> int:
        """Bytes of a stored token: 2 where its number fits into 16 bits, else 4."""
        return 2 if self.spec.vocab < SHORT_VOCAB else 4

    @property
    def read_bytes(self) -> float:
        """Bytes of samples that a step reads from storage, each sample once."""
        tokens = float(self.token_bytes * self.seq_len)
        return self.global_batch * (tokens if self.sample_bytes is None else self.sample_bytes)

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs for one token (`ModelSpec.flops_per_token`). Without a causal mask attention
        has twice as many; a frozen model has a forward only, a third of all."""
        spec = self.spec
        masked = 3.0 * self.seq_len * (spec.query_dim + spec.value_dim) * spec.layers
        both = spec.flops_per_token(self.seq_len) + (0.0 if self.causal else masked)
        return both if self.trained else both / 3.0

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward half: 3 where it is gated (gate, up, down), else 2."""
        return 2 if self.spec.family == "gpt2" else 3
