"""torchtitan's TOML; names and defaults as in pytorch/torchtitan torchtitan/config/job_config.py.

Older names stand beside the newer ones: `training.batch_size`, `float8` beside `quantize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.models import presets
from meshwright.plan.read.flat import flatten
from meshwright.plan.read.reading import Draft, Keys, Reading
from meshwright.plan.read.torchtitan_pipeline import put_pipeline

# Model and flavor there, preset here; the shapes are the same.
_FLAVORS = {
    ("llama3", "8B"): "llama3-8b",
    ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3-405b",
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
}
_AXES = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}


def read(raw: Mapping[str, Any], source: str, world: int | None) -> Reading:
    """Everything that the file says. Raises ConfigError naming key and fix."""
    keys = Keys(flatten(raw), source)
    draft = Draft(source, "torchtitan", world)
    _put_model(keys, draft)
    for axis, name in _AXES.items():
        key = f"parallelism.{name}_parallel_degree"
        draft.put(f"layout.{axis}", keys.count(key, 1), _origin(keys, key, 1))
    _put_expert_slices(keys, draft)
    if draft.layout["cp"] > 1:
        keys.get("parallelism.context_parallel_rotate_method")
        draft.put("layout.cp_method", "ring", "torchtitan passes keys and values around")
    put_pipeline(keys, draft)
    _put_data(keys, draft)
    _put_batch(keys, draft)
    _put_precision(keys, draft)
    _put_memory(keys, draft)
    return draft.finished(keys)


def _origin(keys: Keys, key: str, default: object) -> str:
    return f"{key} = {keys[key]!r}" if key in keys else f"{key} = {default!r} (default)"


def _put_model(keys: Keys, draft: Draft) -> None:
    name, flavor = keys.get("model.name", "llama3"), keys.get("model.flavor", "debugmodel")
    preset = _FLAVORS.get((str(name), str(flavor)))
    if preset is None:
        known = ", ".join(f"{model} {size}" for model, size in _FLAVORS)
        fix = f"no such flavor of {name} here; give the model's config.json too; known: {known}"
        draft.problems["model.flavor"] = fix
        return
    for key, value in presets.shape(preset).items():
        draft.put(f"model.{key}", value, f"model.name = {name!r}, model.flavor = {flavor!r}")
    if name == "llama3":
        draft.notes.append("model.flavor: read without the rotary scaling of Llama 3.1")


def _put_expert_slices(keys: Keys, draft: Draft) -> None:
    """Experts that are not shared out are cut as all else."""
    key, tp = "parallelism.expert_tensor_parallel_degree", draft.layout["tp"]
    etp, origin = keys.count(key, 1), _origin(keys, key, 1)
    if draft.layout["ep"] == 1:
        etp, origin = tp, f"parallelism.tensor_parallel_degree = {tp}, without expert_parallel"
    draft.put("layout.etp", etp, origin)


def _put_data(keys: Keys, draft: Draft) -> None:
    copies_key = "parallelism.data_parallel_replicate_degree"
    copies = keys.count(copies_key, 1) or 1
    key = "parallelism.data_parallel_shard_degree"
    shard = keys.count(key, -1, least=-1)
    ranks = draft.layout["tp"] * draft.layout["cp"] * draft.layout["pp"]
    if shard is not None and shard > 0:
        needed = ranks * copies * shard
        if draft.world not in (None, needed):
            raise keys.wrong(key, shard, f"the axes make {needed} chips, not {draft.world}")
        draft.world = needed
    key_of_stage = "parallelism.fsdp_reshard_after_forward"
    policy = keys.one_of(key_of_stage, {k: k for k in ("default", "always", "never")}, "default")
    # Weights stay gathered over the micro-batches of a pipeline: what ZeRO-2 holds.
    keep = policy == "never" or (policy == "default" and draft.layout["pp"] > 1)
    draft.put_data_axes(2 if keep else 3, copies, ranks, _origin(keys, key, -1))
    if draft.layout.get("dp_shard") == 1 and draft.layout["cp"] == 1:
        draft.layout.pop("zero", None)
    elif "zero" in draft.layout:
        draft.origins["layout.zero"] = _origin(keys, key_of_stage, "default")


def _put_batch(keys: Keys, draft: Draft) -> None:
    draft.put(
        "seq_len", keys.count("training.seq_len", 2048), _origin(keys, "training.seq_len", 2048)
    )
    key = "training.local_batch_size"
    if key not in keys and "training.batch_size" in keys:
        key = "training.batch_size"
    local = keys.count(key, 8) or 8
    origin = _origin(keys, key, 8)
    draft.put("layout.micro_batch", local, origin)
    if draft.layout["pp"] > 1:
        micro = "parallelism.pipeline_parallel_microbatch_size"
        draft.put("layout.micro_batch", keys.count(micro, 1), _origin(keys, micro, 1))
    batch = keys.count("training.global_batch_size", -1, least=-1) or -1
    if batch > 0:
        draft.put("global_batch", batch, _origin(keys, "training.global_batch_size", -1))
    elif "dp_shard" in draft.layout:
        dp = draft.layout["dp_shard"] * draft.layout["dp_replicate"]
        draft.put("global_batch", local * dp, f"{origin} x {dp} data-parallel ranks")


def _put_precision(keys: Keys, draft: Draft) -> None:
    key = "training.mixed_precision_param"
    known = {"bfloat16": "bf16", "float32": "fp32"}
    draft.put("layout.precision", keys.one_of(key, known, "bf16"), _origin(keys, key, "bfloat16"))
    converters = [str(name) for name in keys.get("model.converters", []) or []]
    scaling = None
    if any("float8" in name for name in converters):
        where = next(
            (p for p in ("quantize.linear.float8", "float8") if f"{p}.recipe_name" in keys),
            "float8",
        )
        recipes = {"tensorwise": "tensor", "rowwise": "row", "rowwise_with_gw_hp": "row"}
        scaling = keys.one_of(f"{where}.recipe_name", recipes, "tensor")
    elif any("mx" in name for name in converters):
        scaling = "block"
    if scaling:
        draft.put("layout.precision", "fp8", f"model.converters = {converters}")
        draft.put("layout.fp8_scaling", scaling, f"model.converters = {converters}")


def _put_memory(keys: Keys, draft: Draft) -> None:
    key = "activation_checkpoint.mode"
    modes = {"none": "none", "selective": "selective", "full": "full", "memory_budget": "selective"}
    mode = keys.one_of(key, modes, "selective")
    draft.put("layout.recompute", mode, _origin(keys, key, "selective"))
    option = "activation_checkpoint.selective_ac_option"
    if mode == "selective" and str(keys.get(option, "2")).isdigit():
        every = keys.get(option, "2")
        draft.notes.append(f"{option}: one layer of {every} is recomputed whole; read as attention")
    if keys.get("training.enable_cpu_offload"):
        draft.put("layout.offload", "optimizer", "training.enable_cpu_offload")
        draft.notes.append("training.enable_cpu_offload: weights are planned on the chip")
    compiled = any(keys.get(key) for key in ("training.compile", "compile.enable"))
    draft.put("layout.compile", compiled, "training.compile, compile.enable")
