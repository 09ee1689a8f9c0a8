"""What a job file says about a model, what follows from it, and which shapes are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Family = Literal["llama", "gpt2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3"]

_ROUTED_ONLY = (
    "top_k",
    "n_shared_experts",
    "expert_ffn_hidden",
    "first_dense_layers",
    "capacity_factor",
    "aux_loss",
    "seq_aux_loss",
    "z_loss",
    "bias_update_rate",
)


class ModelFields(BaseModel):
    """The shape of a decoder; `ModelSpec` adds what it weighs and costs."""

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
    dropout: float = Field(default=0.0, ge=0, lt=1, description="of what each half of a layer adds")

    # Rotary positions stretched beyond the length of pretraining.
    rope_scaling: Literal["none", "llama3", "yarn"] = "none"
    rope_factor: float = Field(default=1.0, ge=1, description="how far long waves are stretched")
    rope_original_len: int = Field(default=0, ge=0, description="tokens before the stretching")
    rope_low_freq: float = Field(default=1.0, gt=0, description="llama3: turns; below, stretched")
    rope_high_freq: float = Field(default=4.0, gt=0, description="llama3: turns; above, kept")
    rope_beta_fast: float = Field(default=32.0, gt=0, description="yarn: turns; above, kept")
    rope_beta_slow: float = Field(default=1.0, gt=0, description="yarn: turns; below, stretched")
    rope_mscale: float = Field(default=0.0, ge=0, description="yarn: of the rotated channels")
    rope_mscale_all_dim: float = Field(default=0.0, ge=0, description="yarn: of all channels")

    # Mixture of experts: `n_experts` = 0 is a dense model.
    n_experts: int = Field(default=0, ge=0, description="routed experts of a layer")
    top_k: int = Field(default=0, ge=0, description="experts that a token goes to")
    n_shared_experts: int = Field(default=0, ge=0, description="experts that every token goes to")
    expert_ffn_hidden: int = Field(default=0, ge=0, description="width of one expert")
    first_dense_layers: int = Field(default=0, ge=0, description="layers without experts")
    gate: Literal["softmax", "sigmoid"] = "softmax"
    norm_top_k: bool = Field(default=True, description="weights of the chosen experts add up to 1")
    routed_scaling: float = Field(default=1.0, gt=0, description="times the routed experts' output")
    expert_groups: int = Field(default=1, gt=0, description="node-limited routing: groups")
    top_k_groups: int = Field(default=1, gt=0, description="groups that a token may go to")
    capacity_factor: float = Field(default=0.0, ge=0, description="0: dropless")
    aux_loss: float = Field(default=0.0, ge=0, description="coefficient: balance of the batch")
    seq_aux_loss: float = Field(default=0.0, ge=0, description="coefficient: of each sequence")
    z_loss: float = Field(default=0.0, ge=0, description="coefficient: router logits stay small")
    bias_update_rate: float = Field(
        default=0.0, ge=0, description="balance by bias, without a loss"
    )

    # Multi-head latent attention: `kv_lora_rank` = 0 is grouped-query attention.
    q_lora_rank: int = Field(default=0, ge=0, description="0: queries are not compressed")
    kv_lora_rank: int = Field(default=0, ge=0)
    qk_rope_head_dim: int = Field(default=0, ge=0, description="rotary part of head_dim")
    v_head_dim: int = Field(default=0, ge=0, description="0: head_dim")

    hf: str = Field(default="", description="folder that the first weights come from")

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
        self._check_attention()
        self._check_latents()
        self._check_rope_scaling()
        if self.n_experts:
            self._check_experts()
            self._check_groups()
        else:
            self._check_dense()
        return self

    def _check_attention(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads ({self.kv_heads}) does not divide heads ({self.heads})")
        if self.family == "gpt2" and self.kv_heads != self.heads:
            raise ValueError("the gpt2 family has no grouped-query attention; leave kv_heads out")
        if self.rope_dim % 2:
            key = "qk_rope_head_dim" if self.latent_attention else "head_dim"
            raise ValueError(f"rotary positions need an even {key}, not {self.rope_dim}")

    def _check_latents(self) -> None:
        if self.latent_attention != (self.family == "deepseek_v3"):
            raise ValueError(
                "kv_lora_rank and the deepseek_v3 family go together; "
                + ("set kv_lora_rank" if not self.latent_attention else "leave kv_lora_rank out")
            )
        if not self.latent_attention:
            for key in ("q_lora_rank", "qk_rope_head_dim", "v_head_dim"):
                if getattr(self, key):
                    raise ValueError(f"{key} ({getattr(self, key)}) needs kv_lora_rank; set both")
        elif self.kv_heads != self.heads:
            raise ValueError("latent attention has keys for every head; leave kv_heads out")
        elif not 0 < self.qk_rope_head_dim < self.head_dim:
            raise ValueError(
                f"qk_rope_head_dim ({self.qk_rope_head_dim}) is the rotary part of head_dim "
                f"({self.head_dim}); it must be above 0 and below it"
            )

    def _check_rope_scaling(self) -> None:
        if self.rope_scaling == "none":
            for key in ("rope_factor", "rope_original_len", "rope_mscale", "rope_mscale_all_dim"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f'{key} ({getattr(self, key)}) needs rope_scaling, not "none"')
            return
        if self.family == "gpt2":
            raise ValueError("the gpt2 family has no rotary positions; leave rope_scaling out")
        if not self.rope_original_len:
            raise ValueError("rope_scaling needs rope_original_len, the tokens of pretraining")
        low, high = ("rope_low_freq", "rope_high_freq")
        if self.rope_scaling == "yarn":
            low, high = ("rope_beta_slow", "rope_beta_fast")
        if getattr(self, low) >= getattr(self, high):
            raise ValueError(f"{low} ({getattr(self, low)}) must be below {high}")

    def _check_dense(self) -> None:
        for key in _ROUTED_ONLY:
            if getattr(self, key):
                raise ValueError(f"{key} ({getattr(self, key)}) needs n_experts; set both")
        if self.expert_groups != 1 or self.top_k_groups != 1:
            raise ValueError("expert_groups and top_k_groups need n_experts; set it too")
        if self.family in ("mixtral", "qwen3_moe"):
            raise ValueError(f"the {self.family} family has routed layers; set n_experts")

    def _check_experts(self) -> None:
        if self.family == "gpt2":
            raise ValueError("the gpt2 family has no routed layers; leave n_experts out")
        if not self.top_k:
            raise ValueError("n_experts needs top_k, the experts that a token goes to")
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k ({self.top_k}) is above n_experts ({self.n_experts})")
        if not self.expert_ffn_hidden:
            raise ValueError("n_experts needs expert_ffn_hidden, the width of one expert")
        if self.first_dense_layers >= self.layers:
            raise ValueError(
                f"first_dense_layers ({self.first_dense_layers}) leaves none of the layers "
                f"({self.layers}) to the experts; lower it, or leave n_experts out"
            )

    def _check_groups(self) -> None:
        if self.n_experts % self.expert_groups:
            raise ValueError(
                f"expert_groups ({self.expert_groups}) does not divide n_experts ({self.n_experts})"
            )
        if self.top_k_groups > self.expert_groups:
            raise ValueError(
                f"top_k_groups ({self.top_k_groups}) is above expert_groups ({self.expert_groups})"
            )
        within_reach = self.top_k_groups * (self.n_experts // self.expert_groups)
        if self.expert_groups > 1 and within_reach < self.top_k:
            raise ValueError(
                f"top_k_groups ({self.top_k_groups}) leaves a token {within_reach} experts, "
                f"below top_k ({self.top_k}); raise it"
            )

    @property
    def latent_attention(self) -> bool:
        """Whether keys and values come from a latent (arXiv 2405.04434)."""
        return self.kv_lora_rank > 0

    @property
    def qk_norm(self) -> bool:
        """Whether each head of queries and keys is normalised before it is rotated."""
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def rope_dim(self) -> int:
        """Channels of a head that rotate; 0 with learned positions."""
        if self.family == "gpt2":
            return 0
        return self.qk_rope_head_dim if self.latent_attention else self.head_dim

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads together, in grouped-query attention."""
        return self.kv_heads * self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Width of a value head."""
        return self.v_head_dim or self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of what attention hands to its output projection: a value head for each query."""
        return self.heads * self.value_head_dim

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by before their softmax. With latent attention YaRN's
        temperature for the channels that do not rotate goes in here, as in DeepSeek's own code."""
        scale = 1.0 / math.sqrt(self.head_dim)
        if self.latent_attention and self.rope_scaling == "yarn" and self.rope_mscale_all_dim:
            scale *= self._temperature(self.rope_mscale_all_dim) ** 2
        return scale

    @property
    def rope_gain(self) -> float:
        """What the cosines and sines are multiplied by: YaRN's temperature, arXiv 2309.00071."""
        if self.rope_scaling != "yarn":
            return 1.0
        if self.rope_mscale and self.rope_mscale_all_dim:
            return self._temperature(self.rope_mscale) / self._temperature(self.rope_mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.rope_factor) + 1.0

    def is_moe(self, layer: int) -> bool:
        """Whether layer number `layer` has routed experts."""
        return self.n_experts > 0 and layer >= self.first_dense_layers


def _is_unset(value: object) -> bool:
    return value is None or (type(value) is int and value == 0)
