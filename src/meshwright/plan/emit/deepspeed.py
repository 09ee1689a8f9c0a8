"""DeepSpeed: its JSON and the model's config.json; keys as in DeepSpeed 0.19.8."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright.plan.emit.abilities import OURS_ALONE, Abilities, refuse
from meshwright.plan.emit.plan import Emitted, Plan
from meshwright.plan.emit.text import config_json
from meshwright.plan.layout import expert_lanes

LIMITED: Mapping[str, tuple[Any, ...]] = {
    "sp": (False,),
    "cp_method": ("ulysses",),
    "schedule": ("1f1b",),
    "vpp": (1,),
    "stages": ([],),
    "etp": (1,),
    "recompute": ("none", "full"),
    "recompute_parts": (["attention"],),
    "precision": ("fp32", "bf16", "fp16"),
    "fp8_scaling": (),
    "grad_compression": ("none", "int8"),
    "offload": ("none", "optimizer"),
    **OURS_ALONE,
}
ABILITIES = Abilities(
    framework="deepspeed",
    title="DeepSpeed",
    written=frozenset(
        [
            "dp_replicate",
            "dp_shard",
            "tp",
            "cp",
            "pp",
            "ep",
            "zero",
            "micro_batch",
            "grad_precision",
        ]
    ),
    limited=LIMITED,
    left_out={"compile": "no key of the JSON; HF's trainer has --torch_compile"},
)

# Families whose experts AutoEP finds (deepspeed/module_inject/auto_ep_presets).
_EXPERTS_FOUND = ("mixtral", "qwen3_moe", "deepseek_v3")
_FILES = ("ds_config.json", "config.json")


def write(plan: Plan) -> Emitted:
    """`ds_config.json` and `config.json`, for HF's run_clm.py or, in a pipeline, your own."""
    _check_sharding(plan)
    _check_precision(plan)
    _check_axes(plan)
    texts = (json.dumps(_config(plan), indent=2) + "\n", config_json(plan.spec))
    files = dict(zip(_FILES, texts, strict=True))
    start = f"deepspeed --num_nodes {plan.nodes} --num_gpus {plan.per_node}"
    if plan.nodes > 1:
        start = start.replace("deepspeed", "deepspeed --hostfile hostfile")
    if plan.layout.pp > 1:
        command = f"{start} train.py --deepspeed_config ds_config.json"
    else:
        command = f"{start} run_clm.py {_arguments(plan)}"
    return Emitted(files, command, tuple(_notes(plan)))


def _check_sharding(plan: Plan) -> None:
    layout, stage = plan.layout, plan.layout.zero_stage
    if layout.dp_replicate > 1 and stage in (1, 2):
        fix = f"DeepSpeed shards ZeRO-{stage} over all replicas; set dp_replicate = 1, or zero = 3"
        raise refuse("dp_replicate", layout.dp_replicate, fix)
    if layout.dp_replicate > 1 and stage == 3 and layout.cp > 1:
        fix = "MiCS, which shards inside groups, has no sequence parallelism; set cp = 1"
        raise refuse("dp_replicate", layout.dp_replicate, fix)
    if layout.grad_compression == "int8" and (stage != 3 or layout.ep > 1):
        fix = "ZeRO++ compresses gradients under zero = 3 with ep = 1; set them, or 'none'"
        raise refuse("grad_compression", "int8", fix)
    if layout.offload != "none" and stage == 0:
        fix = "DeepSpeed offloads what ZeRO shards; set zero = 1, 2 or 3"
        raise refuse("offload", layout.offload, fix)


def _check_precision(plan: Plan) -> None:
    """Without ZeRO gradients are summed in the precision of the weights (its engine's choice of an
    optimizer); ZeRO sums those of bf16 and fp16 in fp32 too."""
    layout = plan.layout
    if layout.precision == "bf16" and layout.grad_precision == "fp32" and not layout.zero_stage:
        fix = "without ZeRO DeepSpeed sums them as bf16; set 'bf16', or zero = 1 with dp_shard"
        raise refuse("grad_precision", "fp32", fix)
    if layout.precision == "fp16" and not layout.zero_stage:
        fix = "without ZeRO DeepSpeed sums fp16 gradients as fp16; set zero = 1 with dp_shard"
        raise refuse("grad_precision", layout.grad_precision, fix)
    if layout.precision != "bf16" and layout.grad_precision == "bf16":
        fix = f"DeepSpeed sums those of {layout.precision} in fp32; set 'fp32', or precision 'bf16'"
        raise refuse("grad_precision", "bf16", fix)


def _check_axes(plan: Plan) -> None:
    layout = plan.layout
    if layout.pp > 1 and layout.zero_stage > 1:
        fix = "DeepSpeed's pipeline takes ZeRO-0 or 1; set zero = 1, or pp = 1"
        raise refuse("zero", layout.zero_stage, fix)
    for key in ("tp", "cp", "ep"):
        if layout.pp > 1 and getattr(layout, key) > 1:
            fix = f"DeepSpeed's pipeline has no {key} of its own; set {key} = 1, or pp = 1"
            raise refuse(key, getattr(layout, key), fix)
    if layout.tp > 1 and layout.cp > 1:
        fix = "AutoTP and Ulysses exclude each other in DeepSpeed; set tp = 1 or cp = 1"
        raise refuse("cp", layout.cp, fix)
    if layout.ep > 1:
        _check_experts(plan)


def _check_experts(plan: Plan) -> None:
    layout = plan.layout
    if plan.spec.family not in _EXPERTS_FOUND:
        fix = f"AutoEP finds the experts of {', '.join(_EXPERTS_FOUND)}; set ep = 1"
        raise refuse("ep", layout.ep, fix)
    if expert_lanes(layout) % layout.ep or (layout.dp_replicate > 1 and layout.zero_stage):
        fix = "must divide dp_shard x cp x tp, with dp_replicate = 1, for AutoEP"
        raise refuse("ep", layout.ep, fix)
    if layout.zero_stage == 3 and layout.cp > 1:
        fix = "AutoEP under ZeRO-3 has no sequence parallelism; set cp = 1, or zero = 2"
        raise refuse("ep", layout.ep, fix)
    if layout.tp > 1 and layout.offload != "none":
        fix = "AutoEP with AutoTP does not offload; set offload = 'none', or tp = 1"
        raise refuse("offload", layout.offload, fix)


def _config(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    found: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "gradient_clipping": 1.0,
        "steps_per_print": 1,
        "zero_optimization": _zero(plan),
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": plan.lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
    }
    if layout.precision != "fp32":
        found[layout.precision] = {"enabled": True}
        found["data_types"] = {"grad_accum_dtype": layout.grad_precision}
    if layout.tp > 1:
        found["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.cp > 1:
        found["sequence_parallel_size"] = layout.cp
    if layout.pp > 1:
        found["pipeline"] = {"stages": layout.pp}
    if layout.ep > 1:
        found["expert_parallel"] = {"enabled": True, "autoep_size": layout.ep}
    return found


def _zero(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    found: dict[str, Any] = {"stage": layout.zero_stage}
    if layout.zero_stage and layout.pp == 1:
        found["overlap_comm"] = True
    if layout.zero_stage == 3 and layout.dp_replicate > 1:
        found["mics_shard_size"] = layout.dp_shard
    if layout.grad_compression == "int8":
        found["zero_quantized_gradients"] = True
    if layout.offload == "optimizer":
        found["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return found


def _arguments(plan: Plan) -> str:
    """HF's trainer wants the same figures as the JSON."""
    layout = plan.layout
    flags = {"bf16": "--bf16 ", "fp16": "--fp16 ", "fp32": ""}[layout.precision]
    if layout.recompute == "full":
        flags += "--gradient_checkpointing "
    return (
        "--deepspeed ds_config.json --config_name . --tokenizer_name $TOKENIZER "
        f"--train_file $TEXT --do_train --output_dir out --block_size {plan.seq_len} "
        f"--per_device_train_batch_size {layout.micro_batch} "
        f"--gradient_accumulation_steps {plan.micro_batches} {flags}"
        f"--max_steps {plan.steps} --learning_rate {plan.lr} --adam_beta2 0.95 "
        f"--weight_decay 0.1 --warmup_steps {plan.warmup} --lr_scheduler_type cosine"
    )


def _notes(plan: Plan) -> list[str]:
    layout, found = plan.layout, []
    if layout.pp > 1:
        found.append(
            f"pp = {layout.pp}: the model must be a deepspeed.pipe.PipelineModule with "
            f"num_stages={layout.pp}; train.py is yours, and calls engine.train_batch() once a step"
        )
    if layout.recompute == "full":
        found.append(
            "recompute = 'full' is no key of the JSON: --gradient_checkpointing asks the model"
        )
    if layout.cp > 1:
        found.append("cp: run_clm.py must register UlyssesSPAttentionHF before it builds the model")
    if layout.precision != "fp32" and layout.zero_stage == 0:
        found.append("without ZeRO every rank keeps fp32 masters of all its weights")
    return found
