"""DeepSpeed's JSON; names as in deepspeedai/DeepSpeed docs/_pages/config-json.md.

Values that are "auto" are the trainer's that calls DeepSpeed, and stay open here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.plan.read.flat import flatten
from meshwright.plan.read.reading import Draft, Keys, Reading

_ZERO = "zero_optimization"


def read(raw: Mapping[str, Any], source: str, world: int | None) -> Reading:
    """Layout, batch and precision; the model is not in there. Raises ConfigError naming the key."""
    keys = Keys(flatten(raw), source)
    draft = Draft(source, "deepspeed", world)
    for key in (key for key, value in keys.unused.items() if value == "auto"):
        draft.notes.append(f'{key} is "auto": left to the trainer that calls DeepSpeed')
    ranks = _put_model_axes(keys, draft)
    _put_sharding(keys, draft, ranks)
    _put_batch(keys, draft, ranks)
    _put_precision(keys, draft)
    _put_offload(keys, draft)
    return draft.finished(keys)


def _origin(keys: Keys, key: str, default: object) -> str:
    return f"{key} = {keys[key]!r}" if key in keys else f"{key} = {default!r} (default)"


def _put_model_axes(keys: Keys, draft: Draft) -> int:
    ranks = 1
    for axis, key in (
        ("tp", "tensor_parallel.autotp_size"),
        ("cp", "sequence_parallel_size"),
        ("pp", "pipeline.stages"),
    ):
        size = keys.count(key, 1) or 1
        draft.put(f"layout.{axis}", size, _origin(keys, key, 1))
        ranks *= size
    if draft.layout["cp"] > 1:
        draft.put("layout.cp_method", "ulysses", "DeepSpeed's sequence parallelism is Ulysses")
    if draft.layout["tp"] > 1:
        draft.put("layout.sp", False, "AutoTP keeps whole sequences between blocks")
    if keys.get("expert_parallel.enabled"):
        key = "expert_parallel.autoep_size"
        draft.put("layout.ep", keys.count(key, 1), _origin(keys, key, 1))
    return ranks


def _put_sharding(keys: Keys, draft: Draft, ranks: int) -> None:
    key = f"{_ZERO}.stage"
    stage = keys.count(key, 0, least=0) or 0
    if stage > 3:
        raise keys.wrong(key, stage, "must be 0, 1, 2 or 3")
    shard = keys.count(f"{_ZERO}.mics_shard_size", -1, least=-1) or -1
    copies = 1
    if shard > 0 and draft.world is not None:
        if draft.world // ranks % shard:
            fix = f"does not divide the {draft.world // ranks} data-parallel ranks"
            raise keys.wrong(f"{_ZERO}.mics_shard_size", shard, fix)
        copies = draft.world // ranks // shard
    draft.put_data_axes(stage, copies, ranks, _origin(keys, key, 0))
    if draft.world is None and stage:
        draft.notes.append(f"{key} = {stage} is set once the number of chips is known")
    if (keys.count(f"{_ZERO}.zero_hpz_partition_size", 1) or 1) > 1:
        draft.notes.append(f"{_ZERO}.zero_hpz_partition_size: second copy of weights is not read")
    if keys.get(f"{_ZERO}.zero_quantized_gradients"):
        origin = f"{_ZERO}.zero_quantized_gradients"
        draft.put("layout.grad_compression", "int8", origin)


def _put_batch(keys: Keys, draft: Draft, ranks: int) -> None:
    micro = keys.count("train_micro_batch_size_per_gpu")
    steps = keys.count("gradient_accumulation_steps")
    batch = keys.count("train_batch_size")
    key = "train_micro_batch_size_per_gpu"
    dp = draft.world // ranks if draft.world else None
    if dp and batch and micro and steps and batch != micro * steps * dp:
        fix = f"must be {key} {micro} x gradient_accumulation_steps {steps} x {dp} ranks"
        raise keys.wrong("train_batch_size", batch, f"{fix} = {micro * steps * dp}")
    if dp and batch and steps and not micro:
        micro, rest = divmod(batch, steps * dp)
        if rest:
            fix = f"is no multiple of gradient_accumulation_steps {steps} x {dp} ranks"
            raise keys.wrong("train_batch_size", batch, fix)
    if dp and micro and not batch:
        batch, key_of_batch = micro * (steps or 1) * dp, key
    else:
        key_of_batch = "train_batch_size"
    draft.put("layout.micro_batch", micro, _origin(keys, key, micro))
    draft.put("global_batch", batch, _origin(keys, key_of_batch, batch))


def _put_precision(keys: Keys, draft: Draft) -> None:
    on = [name for name in ("bf16", "fp16") if keys.get(f"{name}.enabled") is True]
    if len(on) == 2:
        fix = "bf16.enabled is true too; switch one of them off"
        raise ConfigError(f"{keys.source}: fp16.enabled", True, fix)
    if on:
        draft.put("layout.precision", on[0], f"{on[0]}.enabled")
    elif "auto" not in (keys.get("bf16.enabled"), keys.get("fp16.enabled")):
        draft.put("layout.precision", "fp32", "neither bf16.enabled nor fp16.enabled")
    key = "data_types.grad_accum_dtype"
    if key in keys:
        known = {"fp32": "fp32", "bf16": "bf16", "auto": None}
        draft.put("layout.grad_precision", keys.one_of(key, known, None), _origin(keys, key, None))


def _put_offload(keys: Keys, draft: Draft) -> None:
    states = keys.get(f"{_ZERO}.offload_optimizer.device", "none") not in ("none", None)
    activations = bool(keys.get("activation_checkpointing.cpu_checkpointing"))
    if states or activations:
        what = "both" if states and activations else "optimizer" if states else "activations"
        draft.put("layout.offload", what, f"{_ZERO}.offload_optimizer, cpu_checkpointing")
    if keys.get(f"{_ZERO}.offload_param.device", "none") not in ("none", None):
        draft.notes.append(f"{_ZERO}.offload_param: weights are planned on the chip")
    if any(key.startswith("activation_checkpointing.") for key in keys):
        draft.notes.append("whether layers are recomputed is the model's code's; not in this file")
