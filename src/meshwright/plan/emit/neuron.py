"""Neuron NxD Training: its YAML, keys as in examples/conf of neuronx-distributed-training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from meshwright.base.errors import ConfigError
from meshwright.plan.emit.abilities import OURS_ALONE, Abilities, refuse
from meshwright.plan.emit.plan import Emitted, Plan
from meshwright.plan.emit.text import config_json, heading

LIMITED: Mapping[str, tuple[Any, ...]] = {
    "cp_method": ("ring",),
    "schedule": ("1f1b", "interleaved"),
    "stages": ([],),
    "zero": (0, 1),
    "recompute": ("none", "selective", "full"),
    "precision": ("fp32", "bf16"),
    "fp8_scaling": (),
    "grad_compression": ("none",),
    "offload": ("none",),
    **OURS_ALONE,
}
WRITTEN = frozenset(
    [
        "dp_replicate",
        "dp_shard",
        "tp",
        "sp",
        "cp",
        "pp",
        "vpp",
        "ep",
        "micro_batch",
        "recompute_parts",
        "grad_precision",
    ]
)
ABILITIES = Abilities(
    framework="neuron",
    title="NxD Training",
    written=WRITTEN,
    limited=LIMITED,
    left_out={"compile": "the Neuron compiler compiles the whole step", "etp": "follows tp"},
)

_MODELS = {"llama": "hf_llama", "mixtral": "hf_mixtral"}
_LAYER_PARTS = {"llama": "LlamaMLP", "mixtral": "MoE"}


def write(plan: Plan) -> Emitted:
    """`train.yaml` and `config.json`."""
    _check(plan)
    text = yaml.safe_dump(_config(plan), sort_keys=False)
    comment = "".join(f"# {line}\n" for line in heading(plan, "NxD Training").splitlines())
    files = {"train.yaml": comment + text, "config.json": config_json(plan.spec)}
    command = "CONF_FILE=train ./train.sh"
    notes = (
        "both files go to examples/conf of neuronx-distributed-training; train_dir is yours",
        "written after the examples of that repository; no parser of it runs without Neuron",
    )
    return Emitted(files, command, notes)


def _check(plan: Plan) -> None:
    spec, layout = plan.spec, plan.layout
    if spec.family not in _MODELS or (spec.family == "llama" and spec.n_experts):
        raise ConfigError(
            "model.family",
            spec.family,
            f"NxD Training is written for {' and dense '.join(reversed(_MODELS))}; write it for "
            "megatron, fsdp2 or deepspeed",
        )
    if layout.zero_stage and layout.dp_replicate > 1:
        fix = "NxD Training shards the optimizer over all replicas; set dp_replicate = 1"
        raise refuse("dp_replicate", layout.dp_replicate, fix)
    if layout.etp != layout.tp and spec.n_experts and layout.tp > 1:
        fix = f"NxD Training cuts experts as all else; set etp = {layout.tp}"
        raise refuse("etp", layout.etp, fix)


def _config(plan: Plan) -> dict[str, Any]:
    layout, spec = plan.layout, plan.spec
    strategy: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "zero1": layout.zero_stage == 1,
        "sequence_parallel": layout.sequence_parallel,
    }
    if spec.n_experts:
        strategy["expert_model_parallel_size"] = layout.ep
    name = _MODELS[spec.family]
    return {
        "name": name,
        "model_source": "hf",
        "seed": 1234,
        "trainer": _trainer(plan),
        "exp_manager": {
            "create_tensorboard_logger": True,
            "exp_dir": None,
            "name": name,
            "resume_if_exists": False,
            "create_checkpoint_callback": False,
        },
        "distributed_strategy": strategy,
        "data": {
            "micro_batch_size": layout.micro_batch,
            "global_batch_size": plan.global_batch,
            "train_dir": "./data",
        },
        "model": _model(plan),
        "precision": _precision(plan),
        "compiler_flags": "--model-type transformer",
        "compiler_cache_url": "./neuron_cache",
        "bucket_size_collectives": 1024,
    }


def _trainer(plan: Plan) -> dict[str, Any]:
    return {
        "devices": plan.per_node,
        "num_nodes": plan.nodes,
        "max_epochs": -1,
        "max_steps": plan.steps,
        "log_every_n_steps": 1,
        "val_check_interval": plan.steps + 1,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0.0,
        "limit_test_batches": 0.0,
        "gradient_clip_val": 1.0,
    }


def _model(plan: Plan) -> dict[str, Any]:
    layout, spec = plan.layout, plan.spec
    found: dict[str, Any] = {
        "model_config": "./config.json",
        "encoder_seq_length": plan.seq_len,
        "max_position_embeddings": spec.max_seq_len,
        "num_layers": spec.layers,
        "hidden_size": spec.hidden,
        "rope_theta": spec.rope_theta,
        "use_cpu_initialization": True,
        "fusions": {
            "softmax": True,
            "flash_attention": layout.cp == 1,
            "ring_attention": layout.cp > 1,
        },
        "optim": {
            "name": "adamw",
            "lr": plan.lr,
            "weight_decay": 0.1,
            "capturable": False,
            "betas": [0.9, 0.95],
            "sched": {
                "name": "CosineAnnealing",
                "warmup_steps": plan.warmup,
                "max_steps": plan.steps,
                "min_lr": 0.0,
                "constant_steps": 0,
            },
        },
    }
    if layout.recompute != "none":
        found["activations_checkpoint_granularity"] = layout.recompute
    if layout.recompute == "selective":
        parts = {"attention": "CoreAttention", "mlp": _LAYER_PARTS[spec.family]}
        found["activations_checkpoint_recompute"] = [parts[p] for p in layout.recompute_parts]
    if spec.n_experts:
        found["moe"] = _experts(plan)
    return found


def _experts(plan: Plan) -> dict[str, Any]:
    spec = plan.spec
    return {
        "num_experts": spec.n_experts,
        "frequency": 1,
        "dropout": 0.0,
        "capacity_factor": spec.capacity_factor or None,
        "routing_algorithm": "top_k",
        "top_k": spec.top_k,
        "output_router_logits": True,
        "router_aux_loss_coef": spec.aux_loss,
        "normalize_top_k_affinities": spec.norm_top_k,
    }


def _precision(plan: Plan) -> dict[str, Any]:
    if plan.layout.precision == "fp32":
        return {"type": "fp32"}
    if plan.layout.grad_precision == "fp32":
        return {"type": "mixed_precision"}
    return {
        "type": "manual",
        "master_weights": True,
        "fp32_grad_acc": False,
        "xla_use_bf16": "0",
        "xla_downcast_bf16": "1",
        "neuron_rt_stochastic_rounding_en": "0",
    }
