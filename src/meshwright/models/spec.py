"""A model: parameters, FLOPs and bytes follow from its shape alone."""

from __future__ import annotations

from meshwright.models.fields import Family as Family
from meshwright.models.fields import ModelFields


class ModelSpec(ModelFields):
    """A decoder, dense or with routed layers.

    `gpt2`: LayerNorm, learned positions, multi-head attention, GELU (tanh form), biases. All
    others: RMSNorm, rotary positions, SwiGLU, no biases, and attention: `llama` and `mixtral`
    grouped-query, `qwen3` and `qwen3_moe` the same with normed queries and keys,
    `deepseek_v3` latent. Every family but `gpt2` may have routed experts.
    """

    @property
    def _ffn_matrices(self) -> int:
        return 2 if self.family == "gpt2" else 3

    @property
    def _norm_params(self) -> int:
        return (2 if self.family == "gpt2" else 1) * self.hidden

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert."""
        return self._ffn_matrices * self.hidden * self.expert_ffn_hidden

    @property
    def attention_matmul_params(self) -> int:
        """Weights of one layer's attention that take part in matrix products."""
        out = self.value_dim * self.hidden
        if not self.latent_attention:
            return self.hidden * (self.query_dim + 2 * self.kv_dim) + out
        queries = self.hidden * self.query_dim
        if self.q_lora_rank:
            queries = self.q_lora_rank * (self.hidden + self.query_dim)
        down = self.hidden * (self.kv_lora_rank + self.rope_dim)
        up = self.kv_lora_rank * (self.heads * (self.head_dim - self.rope_dim) + self.value_dim)
        return queries + down + up + out

    def matmul_params_of_layer(self, layer: int, active: bool = False) -> int:
        """Weights of layer number `layer` that take part in matrix products; only those that one
        token meets if `active`."""
        if not self.is_moe(layer):
            dense = self._ffn_matrices * self.hidden * self.ffn_hidden
            return self.attention_matmul_params + dense
        experts = (self.top_k if active else self.n_experts) + self.n_shared_experts
        router = self.hidden * self.n_experts
        return self.attention_matmul_params + router + experts * self.expert_params

    def params_of_layer(self, layer: int, active: bool = False) -> int:
        """All weights of layer number `layer`: matrices, norms and biases; only those that one
        token meets if `active`."""
        norms = 2 * self._norm_params
        if self.qk_norm:
            norms += 2 * self.head_dim
        if self.latent_attention:
            norms += self.q_lora_rank + self.kv_lora_rank
        biases = 0
        if self.family == "gpt2":
            biases = self.query_dim + 2 * self.kv_dim + 2 * self.hidden + self.ffn_hidden
        return self.matmul_params_of_layer(layer, active) + norms + biases

    @property
    def embedding_params(self) -> int:
        """Token embedding, and learned positions where the family has them."""
        positions = self.max_seq_len * self.hidden if self.family == "gpt2" else 0
        return self.vocab * self.hidden + positions

    @property
    def params(self) -> int:
        """All weights; a tied head counts once."""
        return self._count(active=False)

    @property
    def active_params(self) -> int:
        """Weights that one token meets: of the routed experts only the chosen ones."""
        return self._count(active=True)

    def _count(self, active: bool) -> int:
        layers = sum(self.params_of_layer(layer, active) for layer in range(self.layers))
        head = 0 if self.tie_embeddings else self.vocab * self.hidden
        return self.embedding_params + layers + self._norm_params + head

    def layer_flops(self, layer: int, seq_len: int) -> float:
        """Model FLOPs of layer number `layer`, forward + backward, for one token in a sequence of
        `seq_len` tokens.

        6 per weight that the token meets in a matrix product, and attention with its causal half:
        2 FLOPs x seq_len/2 for each channel of queries (scores) and of values (their mixing), times
        3 for forward + backward. No recomputation: this is the numerator of MFU.
        """
        matmul = self.matmul_params_of_layer(layer, active=True)
        return 6.0 * matmul + 3.0 * seq_len * (self.query_dim + self.value_dim)

    @property
    def head_flops(self) -> float:
        """Model FLOPs of the output head for one token, forward + backward."""
        return 6.0 * self.vocab * self.hidden

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of forward + backward for one token in a sequence of `seq_len` tokens: all
        layers (see `layer_flops`) and the head; table look-ups, norms and gates not."""
        layers = sum(self.layer_flops(layer, seq_len) for layer in range(self.layers))
        return layers + self.head_flops
