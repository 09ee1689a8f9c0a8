"""Megatron-LM's arguments: layout, batch and precision. The model is read in megatron_model.

Names and defaults as in megatron/training/arguments.py of NVIDIA/Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.plan.read.megatron_model import put_model
from meshwright.plan.read.megatron_pipeline import put_pipeline
from meshwright.plan.read.reading import Draft, Keys, Reading

_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
# The flag, and how it shards where nothing is said: the older one stands for releases in which the
# default was another than in megatron-core 0.19.
_FSDP = {"use-megatron-fsdp": "optim_grads_params", "use-custom-fsdp": "no_shard"}
_FP8_SCALING = {
    "delayed": "tensor",
    "tensorwise": "tensor",
    "blockwise": "block",
    "mxfp8": "block",
    "custom": "tensor",
}
_AXES = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
}


def read(raw: Mapping[str, Any], source: str, world: int | None) -> Reading:
    """Everything that the arguments say. Raises ConfigError naming argument and fix."""
    keys = Keys(raw, source)
    draft = Draft(source, "megatron", world or _world(keys))
    for axis, name in _AXES.items():
        draft.put(f"layout.{axis}", keys.count(name, 1), _origin(keys, name, 1))
    put_model(keys, draft)
    _put_sequences(keys, draft)
    _put_tensor_axes(keys, draft)
    put_pipeline(keys, draft)
    _put_data(keys, draft)
    _put_precision(keys, draft)
    _put_recompute(keys, draft)
    return draft.finished(keys)


def _origin(keys: Keys, name: str, default: object = None) -> str:
    """`--name value`, or that it is the default."""
    if name not in keys:
        return f"--{name} {default} (default)"
    value = keys[name]
    return f"--{name}" if value is True else f"--{name} {value}"


def _world(keys: Keys) -> int | None:
    per_node = keys.count("nproc-per-node") if "nproc-per-node" in keys else None
    nodes = keys.count("nnodes", 1) if "nnodes" in keys else 1
    return per_node * nodes if per_node and nodes else None


def _put_sequences(keys: Keys, draft: Draft) -> None:
    name = "seq-length" if "seq-length" in keys else "decoder-seq-length"
    draft.put("seq_len", keys.count(name), _origin(keys, name))
    draft.put(
        "layout.micro_batch", keys.count("micro-batch-size"), _origin(keys, "micro-batch-size")
    )
    batch = keys.count("global-batch-size")
    draft.put("global_batch", batch, _origin(keys, "global-batch-size"))


def _put_tensor_axes(keys: Keys, draft: Draft) -> None:
    tp, name = draft.layout["tp"], "sequence-parallel"
    if tp > 1:
        draft.put("layout.sp", bool(keys.get(name, False)), _origin(keys, name, "off"))
    if "num-experts" in keys:
        name = "expert-tensor-parallel-size"
        draft.put("layout.etp", keys.count(name, tp), _origin(keys, name, tp))
    if draft.layout["cp"] > 1:
        name = "cp-comm-type"
        known = {"p2p": "ring", "a2a": "ulysses", "all_gather": "ring", "a2a+p2p": "ring"}
        method = keys.one_of(name, known, "ring")
        draft.put("layout.cp_method", method, _origin(keys, name, "p2p"))
        if str(keys.get(name)) in ("all_gather", "a2a+p2p"):
            draft.notes.append(f"--{name} {keys[name]} read as a ring")


def _put_data(keys: Keys, draft: Draft) -> None:
    stage, origin, copies = 0, "no --use-distributed-optimizer", 1
    fsdp = next((name for name in _FSDP if keys.get(name)), None)
    if keys.get("use-distributed-optimizer") or fsdp:  # the former follows from the latter
        stage, origin = 1, "--use-distributed-optimizer"
        copies = keys.count("num-distributed-optimizer-instances", 1) or 1
    if fsdp:
        name, default = "data-parallel-sharding-strategy", _FSDP[fsdp]
        stage, origin = keys.one_of(name, _STRATEGIES, None), _origin(keys, name, default)
        if stage is None:
            stage = _STRATEGIES[default]
            draft.notes.append(f"--{name} not given: {default}, as --{fsdp} has it")
    if keys.get("use-torch-fsdp2"):
        stage, origin = 3, "--use-torch-fsdp2"
    ranks = draft.layout["tp"] * draft.layout["pp"] * draft.layout["cp"]
    draft.put_data_axes(stage, copies, ranks, origin)


def _put_precision(keys: Keys, draft: Draft) -> None:
    for name, precision in (("fp8-format", "fp8"), ("bf16", "bf16"), ("fp16", "fp16")):
        if keys.get(name):
            draft.put("layout.precision", precision, _origin(keys, name))
            break
    else:
        draft.put("layout.precision", "fp32", "neither --bf16 nor --fp16")
    if keys.get("fp8-format"):
        scaling = keys.one_of("fp8-recipe", _FP8_SCALING, "tensor")
        draft.put("layout.fp8_scaling", scaling, _origin(keys, "fp8-recipe", "delayed"))
    if keys.get("fp4-format"):
        draft.notes.append("--fp4-format has no layout of ours; read without it")
    if keys.get("grad-reduce-in-bf16"):
        draft.put("layout.grad_precision", "bf16", "--grad-reduce-in-bf16")


def _put_recompute(keys: Keys, draft: Draft) -> None:
    name = "recompute-granularity"
    known = {"full": "full", "selective": "selective"}
    mode = keys.one_of(name, known, "selective" if keys.get("recompute-activations") else "none")
    draft.put("layout.recompute", mode, _origin(keys, name, mode))
    if mode == "selective":
        modules = str(keys.get("recompute-modules", "core_attn")).split()
        parts = {"core_attn": "attention", "mlp": "mlp", "moe": "mlp"}
        read_ = sorted({parts[module] for module in modules if module in parts})
        draft.put("layout.recompute_parts", read_, _origin(keys, "recompute-modules", "core_attn"))
        ignored = [module for module in modules if module not in parts]
        if ignored:
            draft.notes.append(f"--recompute-modules {' '.join(ignored)} are not read")
    if mode == "full" and keys.get("recompute-method") == "block":
        blocks = keys.count("recompute-num-layers", 0, least=0)
        draft.notes.append(f"only {blocks} layers of a stage are recomputed; read as all of them")
    for name, what in (("optimizer-cpu-offload", "optimizer"), ("cpu-offloading", "activations")):
        if keys.get(name):
            draft.put("layout.offload", what, f"--{name}")
