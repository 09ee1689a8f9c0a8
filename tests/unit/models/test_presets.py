"""Every named model has the parameters that its authors published."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from meshwright.base.errors import ConfigError
from meshwright.models import presets
from meshwright.models.spec import ModelSpec

PUBLISHED = [name for name in presets.names() if presets.published_params(name)]
ROUNDED = {"gpt3-6.7b", "gpt3-13b", "gpt3-175b", "mt-nlg-530b", "gpt-1t"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    published, unit = presets.published_params(name), presets.published_unit(name)
    assert published is not None
    assert round(presets.preset(name).params / unit) * unit == published


def test_only_figures_from_papers_are_rounded_and_to_the_digits_printed() -> None:
    units = {name: presets.published_unit(name) for name in PUBLISHED}
    assert {name for name, unit in units.items() if unit != 1} == ROUNDED
    assert all(unit * 10 < (presets.published_params(name) or 0) for name, unit in units.items()), (
        units
    )


@pytest.mark.parametrize(
    "name, params",
    [
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("qwen3-8b", 8_190_735_360),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("deepseek-v3", 671_026_419_200 - 58 * 256),  # the public count has the routing biases
    ],
)
def test_well_known_counts_do_not_depend_on_the_data_file(name: str, params: int) -> None:
    assert presets.preset(name).params == params


def _transformers_params(model: ModelSpec) -> int:
    """Parameters of the same shape in the `transformers` library, a tied head counted once."""
    config = _gpt2(model) if model.family == "gpt2" else _decoder(model)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in built.parameters())


def _decoder(model: ModelSpec) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "tie_word_embeddings": model.tie_embeddings,
    }
    match model.family:
        case "llama":
            return transformers.LlamaConfig(**shape, head_dim=model.head_dim)
        case "qwen3":
            return transformers.Qwen3Config(**shape, head_dim=model.head_dim)
        case "mixtral":
            shape["intermediate_size"] = model.expert_ffn_hidden
            return transformers.MixtralConfig(**shape, num_local_experts=model.n_experts)
        case "qwen3_moe":
            return transformers.Qwen3MoeConfig(
                **shape,
                head_dim=model.head_dim,
                num_experts=model.n_experts,
                moe_intermediate_size=model.expert_ffn_hidden,
                mlp_only_layers=list(range(model.first_dense_layers)),
            )
    return transformers.DeepseekV3Config(
        **shape,
        n_routed_experts=model.n_experts,
        n_shared_experts=model.n_shared_experts,
        moe_intermediate_size=model.expert_ffn_hidden,
        first_k_dense_replace=model.first_dense_layers,
        q_lora_rank=model.q_lora_rank or None,
        kv_lora_rank=model.kv_lora_rank,
        qk_rope_head_dim=model.qk_rope_head_dim,
        qk_nope_head_dim=model.head_dim - model.qk_rope_head_dim,
        v_head_dim=model.v_head_dim,
    )


def _gpt2(model: ModelSpec) -> Any:
    return transformers.GPT2Config(
        vocab_size=model.vocab,
        n_positions=model.max_seq_len,
        n_embd=model.hidden,
        n_layer=model.layers,
        n_head=model.heads,
        n_inner=model.ffn_hidden,
        tie_word_embeddings=model.tie_embeddings,
    )


@pytest.mark.parametrize(
    "name",
    [
        "tiny",
        "smollm-135m",
        "llama3-8b",
        "gpt2",
        "gpt3-175b",
        "qwen3-0.6b",
        "mixtral-8x22b",
        "qwen3-30b-a3b",
        "deepseek-v2-lite",
        "deepseek-v3",
    ],
)
def test_parameters_are_those_of_the_transformers_model(name: str) -> None:
    model = presets.preset(name)
    assert _transformers_params(model) == model.params


def test_untied_and_odd_head_dim_count_as_in_transformers() -> None:
    shape = {"layers": 2, "hidden": 48, "heads": 6, "kv_heads": 3, "head_dim": 16, "vocab": 99}
    model = ModelSpec.model_validate({"family": "llama", "ffn_hidden": 77, **shape})
    assert _transformers_params(model) == model.params


def test_unknown_preset_names_the_near_miss() -> None:
    with pytest.raises(ConfigError, match=r'model.preset = .llama3-8B.: .*mean "llama3-8b"'):
        presets.preset("llama3-8B")


def test_unknown_preset_lists_those_there_are_if_none_is_near() -> None:
    with pytest.raises(ConfigError, match=r"known: tiny, small"):
        presets.published_params("zzz")
