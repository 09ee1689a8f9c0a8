"""config.json: what no side can compute is refused, and everything else comes back."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.base.errors import ConfigError, InputError
from meshwright.models import presets
from meshwright.models.hf_config import check_exportable, from_config, to_config
from meshwright.models.spec import ModelSpec

YARN = {"rope_scaling": "yarn", "rope_factor": 40.0, "rope_original_len": 4096}
STRETCHED = {
    "llama3-8b": {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_len": 8192},
    "qwen3-8b": YARN,
    "deepseek-v3": {**YARN, "rope_mscale": 1.0, "rope_mscale_all_dim": 1.0},
}


def stretched(name: str) -> ModelSpec:
    return ModelSpec.model_validate({**presets.shape(name), **STRETCHED[name]})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mixtral-8x7b", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("qwen3-8b", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave = False"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama3-8b", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type = 'dynamic'"),
        ("llama3-8b", {"rope_scaling": {"type": "yarn", "truncate": False}}, "truncate = False"),
        ("llama3-8b", {"rope_scaling": {"type": "llama3"}}, "factor is missing"),
    ],
)
def test_what_our_decoder_would_compute_wrongly_is_refused(
    name: str, change: dict[str, Any], message: str
) -> None:
    config = to_config(presets.preset(name), 0)
    from_config(config, "config.json")
    with pytest.raises(InputError, match=message):
        from_config({**config, **change}, "config.json")


def test_another_temperature_than_the_one_that_follows_is_refused() -> None:
    spec = stretched("qwen3-8b")
    config = to_config(spec, 0)
    rope = {**config["rope_scaling"], "attention_factor": spec.rope_gain}
    assert from_config({**config, "rope_scaling": rope}, "config.json") == spec
    rope["attention_factor"] = 1.0
    with pytest.raises(InputError, match=r"attention_factor = 1\.0"):
        from_config({**config, "rope_scaling": rope}, "config.json")


@pytest.mark.parametrize("name", STRETCHED)
def test_stretched_positions_come_back_from_either_form(name: str) -> None:
    spec = stretched(name)
    only_training = {"bias_update_rate": 0.0, "seq_aux_loss": 0.0}
    config = to_config(spec, 0)
    assert from_config(config, name) == spec.model_copy(update=only_training)
    rope = {**config.pop("rope_scaling"), "rope_theta": config.pop("rope_theta")}
    assert from_config({**config, "rope_parameters": rope}, name) == spec.model_copy(
        update=only_training
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama3-8b", {"n_experts": 8, "top_k": 2}, r"model\.n_experts = 8: LlamaForCausalLM"),
        ("mixtral-8x7b", {"norm_top_k": False}, r"model\.norm_top_k = False"),
        ("mixtral-8x7b", {"n_shared_experts": 1}, r"model\.n_shared_experts = 1"),
        ("qwen3-30b-a3b", {"gate": "sigmoid"}, r"model\.gate = 'sigmoid'"),
        ("qwen3-30b-a3b", {"bias_update_rate": 0.001}, r"model\.bias_update_rate = 0\.001"),
        ("deepseek-v2-lite", {}, r"model\.gate = 'softmax': DeepseekV3ForCausalLM"),
        ("deepseek-v3", {"n_shared_experts": 0}, r"model\.n_shared_experts = 0"),
        ("deepseek-v3", {"expert_groups": 256}, r"model\.expert_groups = 256"),
    ],
)
def test_models_that_no_class_of_transformers_computes_are_refused(
    name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_exportable(presets.preset(name).model_copy(update=change))


@pytest.mark.parametrize("name", [n for n in presets.names() if n != "deepseek-v2-lite"])
def test_every_preset_survives_its_config(name: str) -> None:
    spec = presets.preset(name)
    back = from_config(to_config(spec, 0), name)
    only_training = {"bias_update_rate": 0.0, "seq_aux_loss": 0.0}
    assert back == spec.model_copy(update=only_training)
