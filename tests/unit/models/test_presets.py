"""Every named model has the parameters that its authors published."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

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
    ],
)
def test_well_known_counts_do_not_depend_on_the_data_file(name: str, params: int) -> None:
    assert presets.preset(name).params == params


def _transformers_params(model: ModelSpec) -> int:
    """Parameters of the same shape in the `transformers` library, a tied head counted once."""
    with torch.device("meta"):
        built = _llama(model) if model.family == "llama" else _gpt2(model)
    return sum(parameter.numel() for parameter in built.parameters())


def _llama(model: ModelSpec) -> torch.nn.Module:
    built: torch.nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab,
            hidden_size=model.hidden,
            intermediate_size=model.ffn_hidden,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            head_dim=model.head_dim,
            tie_word_embeddings=model.tie_embeddings,
        )
    )
    return built


def _gpt2(model: ModelSpec) -> torch.nn.Module:
    built: torch.nn.Module = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=model.vocab,
            n_positions=model.max_seq_len,
            n_embd=model.hidden,
            n_layer=model.layers,
            n_head=model.heads,
            n_inner=model.ffn_hidden,
            tie_word_embeddings=model.tie_embeddings,
        )
    )
    return built


@pytest.mark.parametrize("name", ["tiny", "smollm-135m", "llama3-8b", "gpt2", "gpt3-175b"])
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
