"""The shape of a model: parameters, FLOPs and bytes follow from it alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Family = Literal["llama", "gpt2"]


class ModelSpec(BaseModel):
    """A dense decoder.

    `llama`: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.
    `gpt2`: LayerNorm, learned positions, multi-head attention, GELU (tanh form), biases.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    family: Family
    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(default=0, ge=0, description="0: as many as heads")
    head_dim: int = Field(default=0, ge=0, description="0: hidden / heads")
    ffn_hidden: int = Field(default=0, ge=0, description="0: 4 x hidden")
    vocab: int = Field(gt=0)
    max_seq_len: int = Field(default=2048, gt=0, description="rows of the learned positions")
    tie_embeddings: bool = False
    rope_theta: float = Field(default=10_000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, raw: object) -> object:
        if not isinstance(raw, Mapping):
            return raw
        heads, hidden = raw.get("heads"), raw.get("hidden")
        if not (isinstance(heads, int) and isinstance(hidden, int) and heads > 0 and hidden > 0):
            return raw
        derived = {"kv_heads": heads, "head_dim": hidden // heads, "ffn_hidden": 4 * hidden}
        unset = {key: value for key, value in derived.items() if _is_unset(raw.get(key))}
        if "head_dim" in unset and hidden % heads:
            raise ValueError(
                f"hidden ({hidden}) is not a multiple of heads ({heads}); set head_dim too"
            )
        return {**raw, **unset}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads ({self.kv_heads}) does not divide heads ({self.heads})")
        if self.family == "gpt2" and self.kv_heads != self.heads:
            raise ValueError("the gpt2 family has no grouped-query attention; leave kv_heads out")
        if self.family == "llama" and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_dim}")
        return self

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matmul_params(self) -> int:
        """Weights of one layer that take part in matrix products."""
        attention = self.hidden * (2 * self.query_dim + 2 * self.kv_dim)
        matrices = 3 if self.family == "llama" else 2
        return attention + matrices * self.hidden * self.ffn_hidden

    @property
    def layer_params(self) -> int:
        """All weights of one layer: matrices, norms and biases."""
        if self.family == "llama":
            return self.layer_matmul_params + 2 * self.hidden
        norms = 4 * self.hidden
        biases = self.query_dim + 2 * self.kv_dim + self.hidden + self.ffn_hidden + self.hidden
        return self.layer_matmul_params + norms + biases

    @property
    def embedding_params(self) -> int:
        """Token embedding, and learned positions where the family has them."""
        positions = self.max_seq_len * self.hidden if self.family == "gpt2" else 0
        return self.vocab * self.hidden + positions

    @property
    def params(self) -> int:
        """All weights; a tied head counts once."""
        final_norm = self.hidden if self.family == "llama" else 2 * self.hidden
        head = 0 if self.tie_embeddings else self.vocab * self.hidden
        return self.embedding_params + self.layers * self.layer_params + final_norm + head

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of forward + backward for one token in a sequence of `seq_len` tokens.

        6 per weight of every matrix product (the head included, table look-ups not), and attention
        with its causal half: forward 2 products x 2 FLOPs x seq_len/2 x query_dim a layer, times 3
        for forward + backward. No recomputation: this is the numerator of MFU.
        """
        matmul = self.layers * self.layer_matmul_params + self.vocab * self.hidden
        attention = self.layers * seq_len * self.query_dim
        return 6.0 * matmul + 6.0 * attention


def _is_unset(value: object) -> bool:
    return value is None or (type(value) is int and value == 0)
