"""torchtitan's TOML, DeepSpeed's JSON, a model's config.json, and two of them together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import ConfigError, InputError
from meshwright.models import presets
from meshwright.models.hf_config import to_config
from meshwright.plan.read import Reading, read

TITAN = """
[job]
dump_folder = "./outputs"
description = "Llama 3 405B"

[model]
name = "llama3"
flavor = "405B"
converters = ["float8"]

[optimizer]
name = "AdamW"
lr = 8e-5

[training]
local_batch_size = 2
seq_len = 8192
steps = 3000
compile = true

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
pipeline_parallel_degree = 1
context_parallel_degree = 1

[activation_checkpoint]
mode = "full"

[float8]
enable_fsdp_float8_all_gather = true
recipe_name = "rowwise"
filter_fqns = ["output"]
"""

DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "stage3_prefetch_bucket_size": 5e8,
    },
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "tensor_parallel": {"autotp_size": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
}


def written(folder: Path, name: str, content: str | dict[str, Any]) -> Path:
    path = folder / name
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def titan(folder: Path, *changes: tuple[str, str], world: int | None = 256) -> Reading:
    text = TITAN
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return read(written(folder, "titan.toml", text), world)


def deepspeed(folder: Path, world: int | None = 64, **changes: Any) -> Reading:
    raw = {key: value for key, value in {**DEEPSPEED, **changes}.items() if value is not None}
    return read(written(folder, "ds_config.json", raw), world)


def test_torchtitan_gives_model_layout_and_batch(tmp_path: Path) -> None:
    found = titan(tmp_path)
    assert found.format == "torchtitan"
    assert found.spec() == presets.preset("llama3-405b")
    layout = found.to_layout()
    assert (layout.tp, layout.dp_replicate, layout.dp_shard, layout.zero) == (8, 2, 16, 3)
    assert (layout.precision, layout.fp8_scaling, layout.recompute) == ("fp8", "row", "full")
    assert (layout.micro_batch, layout.compile) == (2, True)
    assert (found.seq_len, found.global_batch) == (8192, 64)
    assert found.origins["layout.dp_shard"] == "parallelism.data_parallel_shard_degree = -1"
    assert found.unused["optimizer.lr"] == 8e-5
    assert found.unused["parallelism.enable_async_tensor_parallel"] is True


def test_torchtitan_keeps_weights_gathered_in_a_pipeline(tmp_path: Path) -> None:
    changes = (
        ("pipeline_parallel_degree = 1", "pipeline_parallel_degree = 4"),
        ("enable_async_tensor_parallel", 'pipeline_parallel_schedule = "Interleaved1F1B"\nx'),
    )
    layout = titan(tmp_path, *changes).to_layout()
    assert (layout.pp, layout.schedule, layout.vpp, layout.zero) == (4, "interleaved", 2, 2)
    assert layout.micro_batch == 1  # of the pipeline, not the local batch
    always = (*changes, ("converters", "print_after_conversion = true\nconverters"))
    text = ("[parallelism]", '[parallelism]\nfsdp_reshard_after_forward = "always"')
    assert titan(tmp_path, *always, text).to_layout().zero == 3


@pytest.mark.parametrize(
    "schedule, ours",
    [("1F1B", "1f1b"), ("gpipe", "gpipe"), ("ZBVZeroBubble", "zbv"), ("DualPipeV", "dualpipev")],
)
def test_torchtitans_schedules_are_ours(tmp_path: Path, schedule: str, ours: str) -> None:
    line = f'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "{schedule}"'
    assert titan(tmp_path, ("pipeline_parallel_degree = 1", line)).layout["schedule"] == ours


def test_a_full_set_of_degrees_gives_the_world(tmp_path: Path) -> None:
    found = titan(tmp_path, ("shard_degree = -1", "shard_degree = 4"), world=None)
    assert found.world == 64
    assert found.to_layout().world == 64


@pytest.mark.parametrize(
    "old, new, key, says",
    [
        ("shard_degree = -1", "shard_degree = 4", "shard_degree", "make 64 chips, not 256"),
        ("tensor_parallel_degree = 8", "tensor_parallel_degree = 3", "world", "take 6 chips"),
        ("tensor_parallel_degree = 8", "tensor_parallel_degree = true", "tensor", "whole number"),
        ('mode = "full"', 'mode = "half"', "activation_checkpoint.mode", "memory_budget"),
        ('"rowwise"', '"rows"', "float8.recipe_name", "tensorwise"),
    ],
)
def test_torchtitan_keys_that_cannot_be_used_are_named(
    tmp_path: Path, old: str, new: str, key: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        titan(tmp_path, (old, new))
    assert key in caught.value.key and says in str(caught.value)


def test_an_unknown_flavor_asks_for_the_models_own_file(tmp_path: Path) -> None:
    found = titan(tmp_path, ('"405B"', '"406B"'))
    with pytest.raises(ConfigError, match=r"give the model's config.json too"):
        found.spec()
    assert found.unused["model.flavor"] == "406B"
    assert found.to_layout().tp == 8


def test_deepspeed_gives_layout_batch_and_precision(tmp_path: Path) -> None:
    found = deepspeed(tmp_path)
    layout = found.to_layout()
    assert (found.format, found.model) == ("deepspeed", {})
    assert (layout.zero, layout.dp_shard, layout.tp, layout.sp) == (3, 32, 2, False)
    assert (layout.precision, layout.offload, layout.micro_batch) == ("bf16", "optimizer", 2)
    assert found.global_batch == 256
    assert found.origins["layout.zero"] == "zero_optimization.stage = 3"
    assert found.unused["zero_optimization.stage3_prefetch_bucket_size"] == 5e8
    assert found.unused["optimizer.params.lr"] == 1e-5


def test_deepspeed_works_out_the_third_of_its_batch_sizes(tmp_path: Path) -> None:
    assert deepspeed(tmp_path, train_batch_size=None).global_batch == 256
    assert deepspeed(tmp_path, train_micro_batch_size_per_gpu=None).layout["micro_batch"] == 2


def test_deepspeeds_auto_stays_open(tmp_path: Path) -> None:
    found = deepspeed(
        tmp_path,
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
        bf16={"enabled": "auto"},
    )
    assert found.global_batch is None and "micro_batch" not in found.layout
    assert "precision" not in found.layout
    assert sum('"auto"' in note for note in found.notes) == 3


def test_deepspeed_without_zero_replicates(tmp_path: Path) -> None:
    layout = deepspeed(tmp_path, zero_optimization=None).to_layout()
    assert (layout.zero_stage, layout.dp_replicate, layout.dp_shard) == (0, 32, 1)


def test_mics_shards_inside_groups(tmp_path: Path) -> None:
    zero = {"stage": 3, "mics_shard_size": 8}
    layout = deepspeed(tmp_path, zero_optimization=zero).to_layout()
    assert (layout.dp_replicate, layout.dp_shard) == (4, 8)


@pytest.mark.parametrize(
    "changes, key, says",
    [
        ({"train_batch_size": 250}, "train_batch_size", "2 x gradient_accumulation_steps 4 x 32"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage", "whole number"),
        ({"fp16": {"enabled": True}}, "fp16.enabled", "switch one of them off"),
        ({"tensor_parallel": {"autotp_size": 3}}, "world", "take 3 chips"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 5}}, "mics", "does not divide"),
    ],
)
def test_deepspeed_keys_that_cannot_be_used_are_named(
    tmp_path: Path, changes: dict[str, Any], key: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        deepspeed(tmp_path, **changes)
    assert key in caught.value.key and says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_a_models_config_gives_the_model_and_nothing_else(tmp_path: Path, name: str) -> None:
    spec = presets.preset(name)
    raw = {**to_config(spec, 0), "transformers_version": "5.0"}
    found = read(written(tmp_path, "config.json", raw))
    assert found.format == "huggingface"
    assert found.spec().params == spec.params
    assert found.layout == {} and found.global_batch is None
    assert found.unused["transformers_version"] == "5.0"
    assert "vocab_size" not in found.unused
    assert found.origins["model.vocab"] == f"vocab_size = {spec.vocab}"


def test_deepspeed_and_the_models_config_make_a_whole(tmp_path: Path) -> None:
    spec = presets.preset("llama3-8b")
    model = read(written(tmp_path, "config.json", to_config(spec, 0)))
    both = deepspeed(tmp_path).and_also(model)
    assert both.spec().params == spec.params
    assert both.to_layout().dp_shard == 32
    assert both.source == "ds_config.json + config.json"


def test_what_contradicts_is_refused(tmp_path: Path) -> None:
    model = read(written(tmp_path, "config.json", to_config(presets.preset("llama3-8b"), 0)))
    with pytest.raises(ConfigError, match="says"):
        titan(tmp_path).and_also(model)
    with pytest.raises(ConfigError, match=r"global_batch = 256: .* says 128"):
        deepspeed(tmp_path, train_batch_size=128, gradient_accumulation_steps=2).and_also(
            deepspeed(tmp_path)
        )


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("x.json", {"a": 1}, "neither a config.json"),
        ("x.json", "[1]", "must be a JSON object"),
        ("x.json", "{", "not valid JSON"),
        ("x.toml", "a = ", "not valid TOML"),
        ("config.json", {"model_type": "bert"}, "can be read: llama"),
    ],
)
def test_files_of_no_known_kind_are_refused_in_one_line(
    tmp_path: Path, name: str, content: str | dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError) as caught:
        read(written(tmp_path, name, content))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="at least 1 chip"):
        titan(tmp_path, world=0)
