"""Configurations of other trainers: what is written, what is refused, and the way back."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import ConfigError
from meshwright.catalog import cluster
from meshwright.models import presets
from meshwright.models.spec import ModelSpec
from meshwright.plan.emit import Emitted, Plan, abilities, emit, frameworks
from meshwright.plan.emit.abilities import Abilities, meaning
from meshwright.plan.job import load_job
from meshwright.plan.layout import Layout
from meshwright.plan.read import read
from meshwright.plan.stages import stage_layers


def plan(model: str = "llama3-8b", batch: int = 128, **layout: Any) -> Plan:
    parsed = Layout(**layout)
    where = cluster(f"h100:{parsed.world}")
    spec = presets.preset(model)
    return Plan(spec, parsed, min(spec.max_seq_len, 4096), batch, 1000, where)


def written(folder: Path, emitted: Emitted) -> dict[str, Path]:
    for name, text in emitted.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return {name: folder / name for name in emitted.files}


def kept(table: Abilities, layout: Layout, spec: ModelSpec) -> dict[str, Any]:
    """What the configuration holds of a layout."""
    held = meaning(layout, spec)
    if "stages" in held:  # left out, they follow from what layers cost
        held["stages"] = [len(stage) for stage in stage_layers(spec, layout, 4096)]
    return {key: held[key] for key in held if key not in table.left_out}


def table_of(framework: str) -> Abilities:
    return next(table for table in abilities() if table.framework == framework)


@pytest.mark.parametrize("table", abilities(), ids=lambda table: table.framework)
def test_every_framework_has_thought_of_every_key(table: Abilities) -> None:
    assert table.keys == Layout.model_fields.keys()
    assert not table.written & table.limited.keys()
    assert not (table.written | table.limited.keys()) & table.left_out.keys()


Cases = list[tuple[str, dict[str, Any]]]

MEGATRON: Cases = [
    ("llama3-8b", {"dp_shard": 8, "tp": 8, "zero": 1, "precision": "bf16"}),
    ("llama3-70b", {"dp_replicate": 4, "tp": 8, "pp": 4, "zero": 0, "recompute": "full"}),
    ("llama3-70b", {"dp_shard": 4, "dp_replicate": 2, "tp": 8, "cp": 2, "zero": 1, "sp": False}),
    ("llama3-70b", {"dp_shard": 4, "tp": 4, "pp": 4, "vpp": 5, "schedule": "interleaved",
                    "zero": 1, "cp": 2, "cp_method": "ulysses", "precision": "fp16"}),
    ("llama3-8b", {"dp_shard": 8, "dp_replicate": 2, "zero": 3, "grad_precision": "bf16"}),
    ("qwen3-8b", {"dp_shard": 8, "zero": 2, "precision": "fp8", "fp8_scaling": "block"}),
    ("mixtral-8x7b", {"dp_shard": 8, "tp": 2, "ep": 8, "zero": 1, "recompute": "selective"}),
    ("qwen3-30b-a3b", {"dp_shard": 8, "tp": 2, "etp": 2, "ep": 8, "zero": 1}),
    ("deepseek-v3", {"dp_shard": 64, "pp": 16, "ep": 64, "zero": 1, "precision": "fp8",
                     "fp8_scaling": "block", "stages": [3, *[4] * 14, 2],
                     "recompute": "selective", "recompute_parts": ["mlp"]}),
    ("gpt3-13b", {"dp_shard": 4, "pp": 2, "zero": 1, "offload": "optimizer"}),
]  # fmt: skip


@pytest.mark.parametrize("model, layout", MEGATRON)
def test_megatrons_arguments_say_the_plan_again(
    tmp_path: Path, model: str, layout: dict[str, Any]
) -> None:
    wanted = plan(model, **layout)
    files = written(tmp_path, emit("megatron", wanted))
    found = read(files["run.sh"])
    assert found.spec() == wanted.spec
    table = table_of("megatron")
    assert kept(table, found.to_layout(), wanted.spec) == kept(table, wanted.layout, wanted.spec)
    assert (found.seq_len, found.global_batch) == (wanted.seq_len, 128)
    assert found.world == wanted.layout.world


TITAN: Cases = [
    ("llama3-8b", {"dp_shard": 16, "precision": "bf16", "micro_batch": 2}),
    ("llama3-70b", {"dp_replicate": 2, "dp_shard": 8, "tp": 8, "precision": "fp8"}),
    ("llama3-70b", {"dp_shard": 8, "cp": 4, "tp": 2, "zero": 2, "recompute": "full"}),
    ("llama3-70b", {"dp_shard": 4, "pp": 4, "schedule": "interleaved", "vpp": 5, "zero": 2}),
    ("llama3-70b", {"dp_shard": 8, "pp": 4, "schedule": "zbv", "zero": 3, "micro_batch": 4}),
    ("llama3-8b", {"dp_replicate": 8, "zero": 0, "compile": False, "recompute": "selective"}),
    ("deepseek-v3", {"dp_shard": 32, "tp": 4, "ep": 64, "precision": "bf16"}),
    ("deepseek-v3", {"dp_shard": 32, "tp": 4, "etp": 4, "ep": 32, "offload": "optimizer"}),
]


@pytest.mark.parametrize("model, layout", TITAN)
def test_torchtitans_toml_says_the_plan_again(
    tmp_path: Path, model: str, layout: dict[str, Any]
) -> None:
    wanted = plan(model, **layout)
    found = read(written(tmp_path, emit("torchtitan-toml", wanted))["train.toml"])
    assert found.spec() == wanted.spec
    table = table_of("torchtitan-toml")
    assert kept(table, found.to_layout(), wanted.spec) == kept(table, wanted.layout, wanted.spec)
    assert (found.seq_len, found.global_batch, found.world) == (4096, 128, wanted.layout.world)


DEEPSPEED: Cases = [
    ("llama3-8b", {"dp_shard": 16, "zero": 3, "precision": "bf16", "micro_batch": 2}),
    ("llama3-8b", {"dp_replicate": 2, "dp_shard": 8, "zero": 3, "precision": "fp16"}),
    ("llama3-8b", {"dp_shard": 8, "tp": 2, "sp": False, "zero": 2, "offload": "optimizer"}),
    ("llama3-8b", {"dp_shard": 8, "cp": 4, "cp_method": "ulysses", "zero": 3}),
    ("gpt2-xl", {"dp_shard": 2, "pp": 4, "zero": 1, "precision": "bf16"}),
    ("mixtral-8x7b", {"dp_shard": 8, "ep": 8, "zero": 2, "precision": "bf16",
                      "grad_precision": "bf16"}),
]  # fmt: skip


@pytest.mark.parametrize("model, layout", DEEPSPEED)
def test_deepspeeds_json_and_the_models_say_the_plan_again(
    tmp_path: Path, model: str, layout: dict[str, Any]
) -> None:
    wanted = plan(model, **layout)
    files = written(tmp_path, emit("deepspeed", wanted))
    world = wanted.layout.world
    found = read(files["ds_config.json"], world).and_also(read(files["config.json"]))
    table = table_of("deepspeed")
    held = kept(table, found.to_layout(), wanted.spec)
    assert held == kept(table, wanted.layout, wanted.spec)
    assert found.global_batch == 128
    shape = wanted.spec.model_dump(exclude={"max_seq_len"})
    assert found.spec().model_dump(exclude={"max_seq_len"}) == shape


@pytest.mark.parametrize("model, layout", MEGATRON + TITAN + DEEPSPEED)
def test_our_own_job_says_the_plan_again(
    tmp_path: Path, model: str, layout: dict[str, Any]
) -> None:
    wanted = plan(model, **layout)
    job = load_job(written(tmp_path, emit("job", wanted))["job.toml"])
    assert (job.model, job.layout) == (wanted.spec, wanted.layout)
    assert (job.data.seq_len, job.data.global_batch, job.job.steps) == (wanted.seq_len, 128, 1000)


REFUSED = [
    ("deepspeed", {"dp_shard": 8, "cp": 2}, "cp_method", "ulysses"),
    ("deepspeed", {"dp_shard": 8, "tp": 2}, "sp", "False"),
    ("deepspeed", {"dp_shard": 4, "pp": 2, "zero": 2}, "zero", "zero = 1"),
    ("deepspeed", {"dp_replicate": 2, "dp_shard": 4, "zero": 2}, "dp_replicate", "zero = 3"),
    ("deepspeed", {"dp_shard": 4, "pp": 2, "tp": 2, "sp": False, "zero": 1}, "tp", "pp = 1"),
    ("deepspeed", {"dp_shard": 8, "precision": "fp8"}, "precision", "megatron"),
    ("deepspeed", {"dp_replicate": 8, "precision": "bf16"}, "grad_precision", "zero = 1"),
    ("deepspeed", {"dp_replicate": 8, "precision": "fp16"}, "grad_precision", "zero = 1"),
    ("deepspeed", {"dp_shard": 8, "grad_precision": "bf16"}, "grad_precision", "'fp32'"),
    ("torchtitan-toml", {"dp_replicate": 4, "tp": 2}, "dp_replicate", "dp_shard > 1"),
    ("megatron", {"dp_shard": 2, "pp": 4, "schedule": "zbv", "zero": 1}, "schedule", "torchtitan"),
    ("megatron", {"dp_shard": 4, "pp": 2, "schedule": "interleaved", "vpp": 2, "zero": 1}, "pp",
     "1f1b"),
    ("megatron", {"dp_shard": 8, "precision": "fp8"}, "fp8_scaling", "torchtitan"),
    ("torchtitan", {"dp_shard": 8, "zero": 1}, "zero", "megatron"),
    ("torchtitan", {"dp_shard": 8, "cp": 2, "cp_method": "ulysses"}, "cp_method", "deepspeed"),
    ("torchtitan", {"dp_replicate": 8, "cp": 2}, "zero", "zero = 3"),
    ("torchtitan-toml", {"dp_shard": 4, "tp": 2, "sp": False}, "sp", "torchtitan"),
    ("fsdp2", {"dp_shard": 4, "tp": 2}, "tp", "torchtitan"),
    ("fsdp2", {"dp_shard": 8, "zero": 1}, "zero", "deepspeed"),
    ("colossalai", {"dp_shard": 8, "zero": 3}, "zero", "fsdp2"),
    ("colossalai", {"dp_shard": 4, "pp": 2, "zero": 2}, "zero", "zero = 1"),
    ("colossalai", {"dp_shard": 2, "tp": 2, "cp": 2, "zero": 1}, "sp", "sp = false"),
    ("neuron", {"dp_shard": 8, "zero": 3}, "zero", "megatron"),
    ("neuron", {"dp_shard": 8, "cp": 2, "cp_method": "ulysses", "zero": 1}, "cp_method", "'ring'"),
]  # fmt: skip


@pytest.mark.parametrize("framework, layout, key, says", REFUSED)
def test_what_a_framework_cannot_do_is_refused_with_a_way_out(
    framework: str, layout: dict[str, Any], key: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        emit(framework, plan(**layout))
    assert caught.value.key == f"layout.{key}"
    assert says in caught.value.fix and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "framework, model, key",
    [
        ("torchtitan", "mistral-7b", "model"),
        ("colossalai", "qwen3-8b", "model.family"),
        ("neuron", "gpt2", "model.family"),
        ("megatron-bridge", "mixtral-8x7b", "model.family"),
    ],
)
def test_models_that_a_framework_lacks_are_refused(framework: str, model: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        emit(framework, plan(model, dp_replicate=8, zero=0))
    assert caught.value.key == key and "megatron" in caught.value.fix


def test_weights_of_chosen_experts_that_megatron_cannot_have_are_refused() -> None:
    spec = presets.preset("mixtral-8x7b")
    for changes, says in (
        ({"top_k": 1}, "--moe-router-pre-softmax"),
        ({"gate": "sigmoid", "norm_top_k": False}, "top_k is above 1"),
        ({"gate": "sigmoid", "top_k": 1}, "top_k is above 1"),
    ):
        wrong = replace(
            plan("mixtral-8x7b", dp_shard=8, zero=1), spec=spec.model_copy(update=changes)
        )
        with pytest.raises(ConfigError, match=says) as caught:
            emit("megatron", wrong)
        assert caught.value.key == "model.norm_top_k"


def test_megatron_normalises_as_the_plan_says() -> None:
    script = emit("megatron", plan("deepseek-v2-lite", dp_shard=8, zero=1)).files["run.sh"]
    assert "--moe-router-pre-softmax\n" in script
    script = emit("megatron", plan("deepseek-v3", dp_shard=8, zero=1)).files["run.sh"]
    assert "--moe-router-pre-softmax" not in script
    # Its fused rotary kernel asks for this type; by a factor of 1 nothing is stretched.
    assert "--rope-type yarn\n    --rotary-scaling-factor 1.0\n" in script


def test_arguments_reach_megatron_as_they_are_written() -> None:
    """A shell would look for files called `([0]*3+[1]*58)`."""
    script = emit("megatron", plan("deepseek-v3", dp_shard=16, zero=1)).files["run.sh"]
    assert '"${MODEL_ARGS[@]}"' in script and " ${MODEL_ARGS[@]}" not in script
    assert "HOST=first-machine NODE=its-number bash run.sh" in script


@pytest.mark.parametrize("framework", ["torchtitan", "torchtitan-toml"])
def test_torchtitan_cuts_experts_that_it_does_not_share_out(framework: str) -> None:
    emit(framework, plan("qwen3-30b-a3b", dp_shard=4, tp=2, etp=2))
    emit(framework, plan("qwen3-30b-a3b", dp_shard=4, tp=2, ep=8))
    with pytest.raises(ConfigError, match="set etp = 2, or ep > 1"):
        emit(framework, plan("qwen3-30b-a3b", dp_shard=4, tp=2))
    both = plan("qwen3-30b-a3b", dp_shard=4, tp=2, etp=2, ep=4)
    if framework == "torchtitan":
        with pytest.raises(ConfigError, match="set etp = 1, or ep = 1"):
            emit(framework, both)
    else:
        assert "expert_tensor_parallel_degree = 2" in emit(framework, both).files["train.toml"]


def test_experts_are_not_split_where_that_would_be_dropped() -> None:
    with pytest.raises(ConfigError, match="AutoEP under ZeRO-3") as caught:
        emit("deepspeed", plan("mixtral-8x7b", dp_shard=4, cp=2, cp_method="ulysses", ep=8))
    assert caught.value.key == "layout.ep"


def test_a_plan_for_other_chips_is_refused() -> None:
    wrong = Plan(presets.preset("llama3-8b"), Layout(dp_shard=4), 4096, 128, 10, cluster("h100:8"))
    with pytest.raises(ConfigError, match="its axes multiply to 4 ranks, h100:8 has 8"):
        emit("fsdp2", wrong)


def test_an_unknown_framework_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'did you mean "megatron"'):
        emit("megatorn", plan(dp_shard=8))


ANYWHERE: dict[str, dict[str, Any]] = {
    "torchtitan": {"dp_shard": 8, "tp": 2, "pp": 2, "precision": "fp8"},
    "torchtitan-toml": {"dp_shard": 8},
    "megatron": {"dp_shard": 8, "tp": 2, "pp": 2, "zero": 1},
    "megatron-bridge": {"dp_shard": 8, "tp": 2, "pp": 2, "zero": 1},
    "deepspeed": {"dp_shard": 8},
    "fsdp2": {"dp_shard": 4, "dp_replicate": 2, "zero": 2},
    "colossalai": {"dp_shard": 2, "tp": 2, "pp": 2, "zero": 1, "schedule": "zbv"},
    "neuron": {"dp_shard": 2, "tp": 2, "pp": 2, "zero": 1, "recompute": "selective"},
    "job": {"dp_shard": 8},
}


def test_every_framework_is_tried() -> None:
    assert set(ANYWHERE) == set(frameworks())


@pytest.mark.parametrize("framework", frameworks())
def test_every_file_is_of_its_kind(framework: str) -> None:
    parsers: dict[str, Callable[[str], Any]] = {
        ".py": ast.parse,
        ".toml": tomllib.loads,
        ".json": json.loads,
        ".yaml": yaml.safe_load,
    }
    emitted = emit(framework, plan(**ANYWHERE[framework]))
    for name, text in emitted.files.items():
        assert parsers.get(Path(name).suffix, str)(text)
    assert emitted.command and "\n" not in emitted.command


def test_the_scripts_hold_the_plan() -> None:
    wanted = plan(dp_shard=4, dp_replicate=2, zero=2, micro_batch=4)
    script = emit("fsdp2", wanted).files["train.py"]
    assert "DP_REPLICATE, DP_SHARD = 2, 4" in script
    assert "SEQ_LEN, MICRO_BATCH, MICRO_BATCHES = 4096, 4, 4" in script
    assert "RESHARD_AFTER_FORWARD = False" in script
    script = emit("colossalai", plan(dp_shard=2, cp=4, sp=False, zero=1)).files["train.py"]
    assert "sequence_parallelism_mode='ring_attn'" in script.replace('"', "'")
    assert "sp_size=4" in script


def test_the_overrides_of_megatron_bridge_hold_the_plan() -> None:
    wanted = plan("qwen3-30b-a3b", dp_shard=8, tp=2, pp=3, vpp=2, schedule="interleaved", ep=8,
                  zero=1, recompute="selective", recompute_parts=["attention", "mlp"])  # fmt: skip
    found = yaml.safe_load(emit("megatron-bridge", wanted).files["overrides.yaml"])
    model = found["model"]
    assert model["tensor_model_parallel_size"] == 2 and model["sequence_parallel"] is True
    assert model["virtual_pipeline_model_parallel_size"] == 2
    assert model["expert_model_parallel_size"] == 8 and model["expert_tensor_parallel_size"] == 1
    assert model["recompute_modules"] == ["core_attn", "moe"]
    assert found["ddp"]["use_distributed_optimizer"] is True
    assert found["train"]["global_batch_size"] == 128


def test_what_differs_in_meaning_is_noted() -> None:
    notes = emit("torchtitan", plan(dp_shard=8, recompute="selective")).notes
    assert any("not only attention" in note for note in notes)
    notes = emit("deepspeed", plan(dp_shard=8, recompute="full")).notes
    assert any("--gradient_checkpointing" in note for note in notes)
    notes = emit("megatron", plan("llama3-70b", dp_shard=2, tp=2, pp=4, zero=1)).notes
    assert any("by cost they would have" in note for note in notes)


def test_uneven_stages_of_an_interleaved_pipeline_are_drawn() -> None:
    stages = [2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 0]
    wanted = plan(dp_shard=2, pp=4, vpp=3, schedule="interleaved", zero=1, stages=stages)
    script = emit("megatron", wanted).files["run.sh"]
    drawn = "Et*2|" + "|".join(["t*3"] * 10) + "|L"
    assert f"--pipeline-model-parallel-layout '{drawn}'" in script


@settings(max_examples=40, deadline=None)
@given(
    framework=st.sampled_from(["megatron", "torchtitan-toml"]),
    axes=st.tuples(*[st.sampled_from([1, 2, 4]) for _ in range(5)]),
    zero=st.sampled_from([None, 0, 1, 2, 3]),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
def test_a_layout_is_refused_or_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    framework: str,
    axes: tuple[int, ...],
    zero: int | None,
    recompute: str,
) -> None:
    names = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    keys: dict[str, Any] = dict(zip(names, axes, strict=True))
    keys |= {"zero": zero, "recompute": recompute}
    try:
        wanted = plan(**keys)
        emitted = emit(framework, wanted)
    except (ConfigError, ValueError):
        return
    folder = tmp_path_factory.mktemp("emitted")
    (path,) = written(folder, emitted).values()
    table, spec = table_of(framework), wanted.spec
    assert kept(table, read(path).to_layout(), spec) == kept(table, wanted.layout, spec)
