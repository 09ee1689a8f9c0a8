"""Parameters and FLOPs against counts made another way, and the shapes that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.models import presets
from meshwright.models.spec import Family, ModelSpec

SHAPE: dict[str, Any] = {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "vocab": 100}


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    families: tuple[Family, ...] = ("llama", "gpt2")
    family = draw(st.sampled_from(families))
    kv_heads, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads = kv_heads * per_group
    head_dim = 2 * draw(st.integers(1, 8))
    return ModelSpec(
        family=family,
        layers=draw(st.integers(1, 5)),
        hidden=draw(st.integers(1, 64)),
        heads=heads,
        kv_heads=kv_heads if family == "llama" else heads,
        head_dim=head_dim,
        ffn_hidden=draw(st.integers(1, 99)),
        vocab=draw(st.integers(1, 999)),
        max_seq_len=draw(st.integers(1, 99)),
        tie_embeddings=draw(st.booleans()),
    )


def _layer_matrices(m: ModelSpec) -> list[tuple[int, int]]:
    query, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    up = [(m.hidden, m.ffn_hidden)] * (2 if m.family == "llama" else 1)
    attention = [(m.hidden, query), (m.hidden, kv), (m.hidden, kv), (query, m.hidden)]
    return [*attention, *up, (m.ffn_hidden, m.hidden)]


def _tensors(m: ModelSpec) -> list[tuple[int, ...]]:
    """The shape of every tensor of the model, one by one."""
    biased = m.family == "gpt2"
    norm: list[tuple[int, ...]] = [(m.hidden,)] * (2 if biased else 1)
    matrices = _layer_matrices(m)
    biases = [(columns,) for _, columns in matrices] if biased else []
    layer: list[tuple[int, ...]] = [*matrices, *biases, *norm, *norm]
    positions = [(m.max_seq_len, m.hidden)] if biased else []
    head = [] if m.tie_embeddings else [(m.hidden, m.vocab)]
    return [(m.vocab, m.hidden), *positions, *(layer * m.layers), *norm, *head]


@settings(deadline=None)
@given(models())
def test_parameters_are_the_sum_over_all_tensors(model: ModelSpec) -> None:
    assert model.params == sum(math.prod(shape) for shape in _tensors(model))


def _flops_of_a_sequence(m: ModelSpec, seq_len: int) -> float:
    """Forward and backward of one sequence, product by product, query by query."""
    per_token = sum(2 * rows * columns for rows, columns in _layer_matrices(m)) * m.layers
    head = 2 * m.hidden * m.vocab
    # The causal half as the field counts it: a query sees seq_len / 2 keys on average.
    scores_and_values = 2 * (2 * m.heads * m.head_dim) * (seq_len / 2) * m.layers
    return 3 * seq_len * (per_token + head + scores_and_values)


@settings(deadline=None)
@given(models(), st.integers(1, 4096))
def test_flops_are_those_of_every_product(model: ModelSpec, seq_len: int) -> None:
    expected = _flops_of_a_sequence(model, seq_len) / seq_len
    assert model.flops_per_token(seq_len) == pytest.approx(expected, rel=1e-12)


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
    ],
)
def test_shapes_that_cannot_be_built_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ModelSpec.model_validate({**SHAPE, **change})
    assert says in str(caught.value)
