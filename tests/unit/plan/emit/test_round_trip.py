"""Plans of any shape: what is written for a framework says the same plan when it is read again."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshwright.base.errors import ConfigError
from meshwright.catalog import cluster
from meshwright.models import presets
from meshwright.models.spec import ModelSpec
from meshwright.plan.emit import Plan, abilities, emit, frameworks
from meshwright.plan.emit.abilities import meaning
from meshwright.plan.job import load_job
from meshwright.plan.layout import Layout
from meshwright.plan.read import Reading, read
from meshwright.plan.stages import stage_layers

TABLES = {table.framework: table for table in abilities()}
# Emitters whose configuration a reader of ours understands; of the others only config.json is.
READ_BACK = ("megatron", "torchtitan-toml", "deepspeed", "job")
MODELS = {
    "megatron": ("llama3-8b", "gpt2-xl", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b",
                 "deepseek-v2-lite", "deepseek-v3"),
    "torchtitan-toml": ("llama3-8b", "llama3-70b", "qwen3-30b-a3b", "deepseek-v3"),
    "deepspeed": ("llama3-8b", "gpt2", "mixtral-8x7b", "qwen3-30b-a3b"),
    "job": ("llama3-8b", "gpt2", "qwen3-30b-a3b", "deepseek-v2-lite"),
}  # fmt: skip
# Fields that the config.json of some family has no key for.
NOT_IN_CONFIG = {"seq_aux_loss", "z_loss", "bias_update_rate", "capacity_factor", "dropout"}
# DeepSpeed's JSON does not say what is recomputed: the command does.
NOT_IN_FILE = {"deepspeed": ("recompute",)}


@st.composite
def layouts(draw: st.DrawFn, framework: str, spec: ModelSpec) -> dict[str, Any]:
    """Keys of a layout of values that the framework takes at all; together they may not go."""
    deepspeed = framework == "deepspeed"
    table = TABLES[framework]

    def one_of(key: str, *values: Any) -> Any:
        return draw(st.sampled_from([value for value in values if table.takes(key, value)]))

    keys: dict[str, Any] = {
        "dp_shard": draw(st.sampled_from([2, 4, 8])),
        "dp_replicate": draw(st.sampled_from([1, 1, 2])),
        "micro_batch": draw(st.sampled_from([1, 2])),
        "zero": one_of("zero", 1, 2, 3),
        "precision": one_of("precision", "fp32", "bf16", "fp16", "fp8"),
        "recompute": one_of("recompute", "none", "selective", "full"),
        "grad_precision": one_of("grad_precision", "fp32", "bf16"),
        "offload": draw(st.sampled_from(["none", "none", "optimizer"])),
    }
    if keys["precision"] == "fp8":
        keys["fp8_scaling"] = one_of("fp8_scaling", "tensor", "row", "block")
    shape = draw(st.sampled_from(["tp", "cp", "pp"] if deepspeed else ["tp", "tp+cp", "pp", "all"]))
    if shape in ("tp", "tp+cp", "all"):
        keys |= {"tp": draw(st.sampled_from([2, 4])), "sp": one_of("sp", True, False)}
        if spec.n_experts:
            keys["etp"] = one_of("etp", 1, keys["tp"])
    if shape in ("cp", "tp+cp"):
        keys |= {"cp": 2, "cp_method": one_of("cp_method", "ring", "ulysses")}
    if shape in ("pp", "all"):
        keys["pp"] = 4
        keys["schedule"] = one_of("schedule", "1f1b", "gpipe", "interleaved", "zbv")
        keys["vpp"] = 2 if keys["schedule"] == "interleaved" else 1
        if deepspeed:
            keys["zero"] = 1
        else:
            keys |= draw(stages(spec, 4 * (2 if keys["schedule"] != "1f1b" else 1)))
    if spec.n_experts and shape != "pp":
        keys["ep"] = draw(st.sampled_from([1, 2]))
    return keys


@st.composite
def stages(draw: st.DrawFn, spec: ModelSpec, count: int) -> dict[str, Any]:
    """Layers of each stage, or nothing."""
    if draw(st.booleans()):
        return {}
    cuts = st.lists(st.integers(1, spec.layers - 1), min_size=count - 1, max_size=count - 1)
    ends = [0, *sorted(draw(cuts.filter(lambda found: len(set(found)) == count - 1))), spec.layers]
    return {"stages": [end - start for start, end in pairwise(ends)]}


@st.composite
def specs(draw: st.DrawFn, framework: str) -> ModelSpec:
    """A preset, with what only Megatron's arguments and our own job say drawn anew."""
    raw = presets.shape(draw(st.sampled_from(MODELS[framework])))
    if framework not in ("megatron", "job"):
        return ModelSpec(**raw)
    if raw["family"] in ("llama", "qwen3") and draw(st.booleans()):
        factor = draw(st.sampled_from([8.0, 32.0]))
        raw |= {"rope_scaling": "llama3", "rope_factor": factor, "rope_original_len": 8192}
    if raw["family"] == "deepseek_v3" and draw(st.booleans()):
        mscale = draw(st.sampled_from([0.0, 0.707, 1.0]))
        raw |= {"rope_scaling": "yarn", "rope_factor": 40.0, "rope_original_len": 4096,
                "rope_mscale": mscale, "rope_mscale_all_dim": mscale}  # fmt: skip
    if raw.get("n_experts"):
        weights = st.sampled_from([0.0, 1e-3, 1e-2])
        raw |= {"aux_loss": draw(weights), "seq_aux_loss": draw(weights), "z_loss": draw(weights)}
        if raw.get("gate") != "sigmoid":
            raw["norm_top_k"] = draw(st.booleans())
    return ModelSpec(**raw)


@st.composite
def plans(draw: st.DrawFn, framework: str) -> Plan:
    spec = draw(specs(framework))
    try:
        layout = Layout(**draw(layouts(framework, spec)))
        seq_len = min(spec.max_seq_len, 4096)
        plan = Plan(spec, layout, seq_len, 256, 1000, cluster(f"h100:{layout.world}"))
        plan.checked()
    except (ConfigError, ValueError):
        assume(False)
    return plan


def held(framework: str, plan: Plan, layout: Layout) -> dict[str, Any]:
    """What the configuration holds of a layout; stages as they are cut."""
    found = meaning(layout, plan.spec)
    if "stages" in found:
        cut = stage_layers(plan.spec, layout, plan.seq_len)
        found["stages"] = [len(stage) for stage in cut]
    left_out = {*TABLES[framework].left_out, *NOT_IN_FILE.get(framework, ())}
    return {key: value for key, value in found.items() if key not in left_out}


def same_model(found: ModelSpec, wanted: ModelSpec, without: Collection[str] = ()) -> bool:
    """YaRN's mscale may be written otherwise where it turns positions the same."""
    written = {*without, "rope_mscale", "rope_mscale_all_dim"}
    return found.model_dump(exclude=written) == wanted.model_dump(exclude=written) and math.isclose(
        found.rope_gain * found.attention_scale, wanted.rope_gain * wanted.attention_scale
    )


def written(folder: Path, plan: Plan, framework: str) -> dict[str, Path]:
    """The emitted files; a plan that the framework refuses is left out."""
    try:
        emitted = emit(framework, plan)
    except ConfigError:
        assume(False)
    for name, text in emitted.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return {name: folder / name for name in emitted.files}


def read_again(framework: str, files: dict[str, Path], world: int) -> Reading:
    if framework == "deepspeed":
        return read(files["ds_config.json"], world).and_also(read(files["config.json"]))
    (path,) = files.values()
    return read(path)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
@pytest.mark.parametrize("framework", READ_BACK)
def test_a_plan_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, framework: str, data: st.DataObject
) -> None:
    wanted = data.draw(plans(framework))
    files = written(tmp_path_factory.mktemp("emitted"), wanted, framework)
    if framework == "job":
        job = load_job(files["job.toml"])
        assert (job.model, job.layout) == (wanted.spec, wanted.layout)
        assert (job.data.seq_len, job.data.global_batch) == (wanted.seq_len, wanted.global_batch)
        return
    found = read_again(framework, files, wanted.layout.world)
    without = NOT_IN_CONFIG | {"max_seq_len"} if framework == "deepspeed" else set()
    assert same_model(found.spec(), wanted.spec, without)
    ours, theirs = (held(framework, wanted, x) for x in (wanted.layout, found.to_layout()))
    assert theirs == ours
    assert (found.global_batch, found.world) == (wanted.global_batch, wanted.layout.world)
    assert framework == "deepspeed" or found.seq_len == wanted.seq_len


ONE_EACH: dict[str, tuple[str, dict[str, Any]]] = {
    "megatron-bridge": ("qwen3-30b-a3b", {"dp_shard": 8, "tp": 2, "ep": 8, "zero": 1}),
    "fsdp2": ("qwen3-8b", {"dp_shard": 4, "dp_replicate": 2}),
    "colossalai": ("mixtral-8x7b", {"dp_shard": 8, "ep": 4, "zero": 1}),
    "neuron": ("llama3-70b", {"dp_shard": 2, "tp": 8, "pp": 4, "zero": 1}),
}


@pytest.mark.parametrize("framework", ONE_EACH)
def test_the_model_of_the_others_is_in_their_config_json(tmp_path: Path, framework: str) -> None:
    model, keys = ONE_EACH[framework]
    layout, spec = Layout(**keys), presets.preset(model)
    plan = Plan(spec, layout, 4096, 256, 1000, cluster(f"h100:{layout.world}"))
    files = written(tmp_path, plan, framework)
    assert same_model(read(files["config.json"]).spec(), spec, NOT_IN_CONFIG)


def test_every_framework_is_read_back_or_gives_its_model() -> None:
    # torchtitan 0.3 has a module of Python in place of a file, with a flavor in place of a model.
    assert {*READ_BACK, *ONE_EACH, "torchtitan"} == set(frameworks())
