"""Parameters and FLOPs against counts made another way, and the shapes that are refused."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.models import presets
from meshwright.models.spec import Family, ModelSpec

FAMILIES: tuple[Family, ...] = get_args(Family)
SHAPE: dict[str, Any] = {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "vocab": 100}


LATENT = {
    "family": "deepseek_v3",
    "head_dim": 24,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
}
ROUTED = {"n_experts": 8, "top_k": 2, "expert_ffn_hidden": 16}
SCALED = {"rope_scaling": "yarn", "rope_original_len": 64, "rope_factor": 4.0}

Shape = tuple[int, ...]


def _latent(draw: st.DrawFn) -> dict[str, Any]:
    rope = 2 * draw(st.integers(1, 4))
    return {
        "head_dim": rope + draw(st.integers(1, 9)),
        "qk_rope_head_dim": rope,
        "v_head_dim": draw(st.integers(0, 9)),
        "q_lora_rank": draw(st.integers(0, 9)),
        "kv_lora_rank": draw(st.integers(1, 9)),
    }


def _routed(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    experts = draw(st.integers(1, 9))
    return {
        "n_experts": experts,
        "top_k": draw(st.integers(1, experts)),
        "n_shared_experts": draw(st.integers(0, 2)),
        "expert_ffn_hidden": draw(st.integers(1, 33)),
        "first_dense_layers": draw(st.integers(0, layers - 1)),
    }


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    family = draw(st.sampled_from(FAMILIES))
    kv_heads, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads = kv_heads * per_group
    layers = draw(st.integers(1, 5))
    grouped = family not in ("gpt2", "deepseek_v3")
    shape: dict[str, Any] = {
        "family": family,
        "layers": layers,
        "hidden": draw(st.integers(1, 64)),
        "heads": heads,
        "kv_heads": kv_heads if grouped else heads,
        "head_dim": 2 * draw(st.integers(1, 8)),
        "ffn_hidden": draw(st.integers(1, 99)),
        "vocab": draw(st.integers(1, 999)),
        "max_seq_len": draw(st.integers(1, 99)),
        "tie_embeddings": draw(st.booleans()),
    }
    if family == "deepseek_v3":
        shape |= _latent(draw)
    if family in ("mixtral", "qwen3_moe") or (family != "gpt2" and draw(st.booleans())):
        shape |= _routed(draw, layers)
    return ModelSpec.model_validate(shape)


def _attention_matrices(m: ModelSpec) -> list[Shape]:
    query, value = m.heads * m.head_dim, m.heads * (m.v_head_dim or m.head_dim)
    if m.family != "deepseek_v3":
        kv = m.kv_heads * m.head_dim
        return [(m.hidden, query), (m.hidden, kv), (m.hidden, kv), (query, m.hidden)]
    plain = m.heads * (m.head_dim - m.qk_rope_head_dim)
    queries = [(m.hidden, query)]
    if m.q_lora_rank:
        queries = [(m.hidden, m.q_lora_rank), (m.q_lora_rank, query)]
    latent = (m.hidden, m.kv_lora_rank + m.qk_rope_head_dim)
    return [*queries, latent, (m.kv_lora_rank, plain + value), (value, m.hidden)]


def _ffn_matrices(m: ModelSpec, layer: int, experts: int) -> list[Shape]:
    """`experts`: of the routed ones, how many are counted."""
    if not m.n_experts or layer < m.first_dense_layers:
        up = [(m.hidden, m.ffn_hidden)] * (1 if m.family == "gpt2" else 2)
        return [*up, (m.ffn_hidden, m.hidden)]
    f = m.expert_ffn_hidden
    expert = [(m.hidden, f), (m.hidden, f), (f, m.hidden)]
    return [(m.hidden, m.n_experts), *(expert * (experts + m.n_shared_experts))]


def _layer_matrices(m: ModelSpec, layer: int, experts: int) -> list[Shape]:
    return [*_attention_matrices(m), *_ffn_matrices(m, layer, experts)]


def _norms(m: ModelSpec) -> list[Shape]:
    """Of one layer."""
    heads = [(m.head_dim,)] * 2 if m.family in ("qwen3", "qwen3_moe") else []
    latents = [(m.q_lora_rank,), (m.kv_lora_rank,)] if m.family == "deepseek_v3" else []
    return [*([(m.hidden,)] * (4 if m.family == "gpt2" else 2)), *heads, *latents]


def _tensors(m: ModelSpec, experts: int) -> list[Shape]:
    """The shape of every tensor of the model, one by one."""
    layers: list[Shape] = []
    for layer in range(m.layers):
        matrices = _layer_matrices(m, layer, experts)
        biases = [(columns,) for _, columns in matrices] if m.family == "gpt2" else []
        layers += [*matrices, *biases, *_norms(m)]
    positions = [(m.max_seq_len, m.hidden)] if m.family == "gpt2" else []
    final = [(m.hidden,)] * (2 if m.family == "gpt2" else 1)
    head = [] if m.tie_embeddings else [(m.hidden, m.vocab)]
    return [(m.vocab, m.hidden), *positions, *layers, *final, *head]


@settings(deadline=None)
@given(models())
def test_parameters_are_the_sum_over_all_tensors(model: ModelSpec) -> None:
    for experts, count in ((model.n_experts, model.params), (model.top_k, model.active_params)):
        assert count == sum(math.prod(shape) for shape in _tensors(model, experts))


def _flops_of_a_sequence(m: ModelSpec, seq_len: int) -> float:
    """Forward and backward of one sequence, product by product, query by query."""
    matrices = [s for layer in range(m.layers) for s in _layer_matrices(m, layer, m.top_k)]
    per_token = sum(2 * rows * columns for rows, columns in matrices)
    head = 2 * m.hidden * m.vocab
    # The causal half as the field counts it: a query sees seq_len / 2 keys on average.
    channels = m.heads * (m.head_dim + (m.v_head_dim or m.head_dim))
    scores_and_values = 2 * channels * (seq_len / 2) * m.layers
    return 3 * seq_len * (per_token + head + scores_and_values)


@settings(deadline=None)
@given(models(), st.integers(1, 4096))
def test_flops_are_those_of_every_product(model: ModelSpec, seq_len: int) -> None:
    expected = _flops_of_a_sequence(model, seq_len) / seq_len
    assert model.flops_per_token(seq_len) == pytest.approx(expected, rel=1e-12)
    layers = sum(model.layer_flops(layer, seq_len) for layer in range(model.layers))
    assert layers + model.head_flops == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "gpt3-175b", "mt-nlg-530b", "gpt-1t"])
def test_flops_agree_with_megatron(name: str) -> None:
    """arXiv 2104.04473, eq. 3, is 96 B s l h^2 (1 + s/6h + V/16lh) with every layer recomputed.

    Without recomputation a layer runs 3 passes, not 4, and the head 3 as before:
    72 B s l h^2 (1 + s/6h + V/12lh). The formula counts full attention, we its causal half: s/12h.
    """
    model = presets.preset(name)
    s, layers, h = model.max_seq_len, model.layers, model.hidden
    expected = 72 * layers * h**2 * (1 + s / (12 * h) + model.vocab / (12 * layers * h))
    assert model.flops_per_token(s) == pytest.approx(expected, rel=1e-12)


def test_flops_of_llama3_8b_by_hand() -> None:
    """6 x (all weights but the input table and the norms) + 6 x 32 layers x 8192 x 4096."""
    in_products = 8_030_261_248 - 128_256 * 4096 - (2 * 32 + 1) * 4096
    expected = 6 * in_products + 6 * 32 * 8192 * 4096
    assert presets.preset("llama3-8b").flops_per_token(8192) == expected == 51_470_401_536


def test_left_out_sizes_follow_from_the_others() -> None:
    model = ModelSpec.model_validate({**SHAPE, "kv_heads": 0})
    assert (model.kv_heads, model.head_dim, model.ffn_hidden) == (4, 16, 256)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"kv_heads": 3}, "kv_heads (3) does not divide heads (4)"),
        ({"heads": 3}, "hidden (64) is not a multiple of heads (3)"),
        ({"heads": 128}, "hidden (64) is not a multiple of heads (128)"),
        ({"head_dim": 15}, "even head_dim, not 15"),
        ({"family": "gpt2", "kv_heads": 2}, "no grouped-query attention"),
        ({"heads": 0}, "greater than 0"),
        ({"heads": "4"}, "valid integer"),
        ({"heads": 4.0}, "valid integer"),
        ({"layers": True}, "valid integer"),
        ({"kv_heads": []}, "valid integer"),
        ({"rope_theta": math.inf}, "finite"),
        ({"norm_eps": math.nan}, "finite"),
        ({"top_k": 2}, "top_k (2) needs n_experts"),
        ({"aux_loss": 0.1}, "aux_loss (0.1) needs n_experts"),
        ({"expert_groups": 2}, "need n_experts"),
        ({"family": "mixtral"}, "the mixtral family has routed layers; set n_experts"),
        ({**ROUTED, "family": "gpt2"}, "gpt2 family has no routed layers"),
        ({**ROUTED, "top_k": 0}, "needs top_k"),
        ({**ROUTED, "top_k": 9}, "top_k (9) is above n_experts (8)"),
        ({**ROUTED, "expert_ffn_hidden": 0}, "needs expert_ffn_hidden"),
        (
            {**ROUTED, "first_dense_layers": 2},
            "first_dense_layers (2) leaves none of the layers (2)",
        ),
        ({**ROUTED, "expert_groups": 3}, "expert_groups (3) does not divide n_experts (8)"),
        ({**ROUTED, "top_k_groups": 2}, "top_k_groups (2) is above expert_groups (1)"),
        ({**ROUTED, "expert_groups": 4, "top_k": 3}, "leaves a token 2 experts, below top_k (3)"),
        ({"family": "deepseek_v3"}, "set kv_lora_rank"),
        ({"kv_lora_rank": 8}, "leave kv_lora_rank out"),
        ({"v_head_dim": 8}, "v_head_dim (8) needs kv_lora_rank"),
        ({**LATENT, "kv_heads": 2}, "keys for every head"),
        ({**LATENT, "qk_rope_head_dim": 0}, "qk_rope_head_dim (0) is the rotary part"),
        ({**LATENT, "qk_rope_head_dim": 24}, "qk_rope_head_dim (24) is the rotary part"),
        ({**LATENT, "qk_rope_head_dim": 7}, "even qk_rope_head_dim, not 7"),
        ({"rope_factor": 2.0}, 'rope_factor (2.0) needs rope_scaling, not "none"'),
        ({**SCALED, "rope_original_len": 0}, "rope_scaling needs rope_original_len"),
        ({**SCALED, "rope_beta_slow": 32.0}, "rope_beta_slow (32.0) must be below rope_beta_fast"),
        ({**SCALED, "family": "gpt2"}, "no rotary positions"),
    ],
)
def test_shapes_that_cannot_be_built_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ModelSpec.model_validate({**SHAPE, **change})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "shape",
    [
        {**ROUTED, "expert_groups": 4, "top_k": 4, "top_k_groups": 2},
        {**ROUTED, "first_dense_layers": 1, "bias_update_rate": 0.001, "gate": "sigmoid"},
        {**LATENT, **ROUTED, "v_head_dim": 6},
        {**SCALED, "rope_scaling": "llama3"},
    ],
)
def test_shapes_that_can_be_built_are_taken(shape: dict[str, Any]) -> None:
    ModelSpec.model_validate({**SHAPE, **shape})


def test_what_a_layer_is() -> None:
    model = ModelSpec.model_validate({**SHAPE, **ROUTED, **LATENT, "first_dense_layers": 1})
    assert [model.is_moe(layer) for layer in range(model.layers)] == [False, True]
    assert (model.latent_attention, model.qk_norm, model.rope_dim) == (True, False, 8)
    assert (model.query_dim, model.value_dim) == (96, 96)
    dense = ModelSpec.model_validate({**SHAPE, "family": "qwen3"})
    assert (dense.latent_attention, dense.qk_norm, dense.rope_dim) == (False, True, 16)
    assert not dense.is_moe(1)


@pytest.mark.parametrize(
    ("name", "billions"), [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22)]
)
def test_active_parameters_are_those_published(name: str, billions: float) -> None:
    """arXiv 2401.04088 (13B, 12.9B in its release notes) and 2505.09388, table 2."""
    assert presets.preset(name).active_params / 1e9 == pytest.approx(billions, rel=0.02)


def test_deepseek_v3_activates_what_its_paper_says() -> None:
    """arXiv 2412.19437, 37B: one table of the two is not a product and is left out."""
    model = presets.preset("deepseek-v3")
    active = model.active_params - model.vocab * model.hidden
    assert round(active / 1e9) == 37
