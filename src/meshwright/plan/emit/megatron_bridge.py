"""Megatron-Bridge 0.6: overrides in YAML, and the script that applies them to the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from meshwright.base.errors import ConfigError
from meshwright.plan.emit.abilities import Abilities
from meshwright.plan.emit.megatron import (
    LEFT_OUT,
    LIMITED,
    WRITTEN,
    check_combinations,
    model_notes,
    parallel_arguments,
    stage_notes,
)
from meshwright.plan.emit.plan import Emitted, Plan
from meshwright.plan.emit.text import config_json, heading, torchrun
from meshwright.plan.layout import Layout

ABILITIES = Abilities(
    framework="megatron-bridge",
    title="Megatron-Bridge",
    written=WRITTEN - {"grad_precision"},
    limited={**LIMITED, "precision": ("fp32", "bf16", "fp8"), "grad_precision": ("fp32",)},
    left_out=LEFT_OUT,
)

_FAMILIES = ("llama", "qwen3", "qwen3_moe", "deepseek_v3")
# Megatron's argument, and the field of the model's provider where it has another name.
_FIELDS = {
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}
_MODEL_ARGUMENTS = [
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "cp-comm-type",
    "sequence-parallel",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "num-virtual-stages-per-pipeline-rank",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "pipeline-model-parallel-layout",
    "recompute-granularity",
    "recompute-method",
    "recompute-num-layers",
    "recompute-modules",
]
_FP8 = {
    "tensor": "bf16_with_fp8_current_scaling_mixed",
    "block": "bf16_with_fp8_subchannel_scaling_mixed",
}

_SCRIPT = '''"""{heading}

Everything that the plan decides is in overrides.yaml.
"""

import os

from megatron.bridge import AutoBridge
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
from transformers import AutoConfig

HERE = os.path.dirname(os.path.abspath(__file__))


def configured():
    """The model of config.json with random weights, mock data, and the overrides."""
    bridge = AutoBridge.from_hf_config(AutoConfig.from_pretrained(HERE))
    config = ConfigContainer(
        model=bridge.to_megatron_provider(load_weights=False),
        train=TrainingConfig(),
        optimizer=OptimizerConfig(),
        scheduler=SchedulerConfig(),
        ddp=DistributedDataParallelConfig(),
        dataset=GPTDatasetConfig(
            seq_length={seq_len},
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
        ),
        logger=LoggerConfig(),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size={vocab}),
        checkpoint=CheckpointConfig(),
        mixed_precision="bf16_mixed",
    )
    overrides = os.path.join(HERE, "overrides.yaml")
    return process_config_with_overrides(config, config_filepath=overrides)


if __name__ == "__main__":
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(configured(), forward_step)
'''


def write(plan: Plan) -> Emitted:
    """`overrides.yaml`, `train.py`, and the `config.json` of the model."""
    check_combinations(plan)
    if plan.spec.family not in _FAMILIES or (plan.spec.family == "llama" and plan.spec.n_experts):
        raise ConfigError(
            "model.family",
            plan.spec.family,
            f"Megatron-Bridge converts {', '.join(_FAMILIES)}; write it for megatron, which takes "
            "any family",
        )
    title = heading(plan, "Megatron-Bridge")
    comment = "".join(f"# {line}\n" for line in title.splitlines())
    files = {
        "overrides.yaml": comment + yaml.safe_dump(_overrides(plan), sort_keys=False),
        "train.py": _SCRIPT.format(heading=title, seq_len=plan.seq_len, vocab=plan.spec.vocab),
        "config.json": config_json(plan.spec),
    }
    notes = [*stage_notes(plan), "data is mock data: set dataset.blend and a tokenizer"]
    notes += model_notes(plan.spec)
    if plan.layout.precision == "fp8" and plan.layout.fp8_scaling == "tensor":
        notes.append("its recipe for fp8 by tensor keeps the first and last layer in bf16")
    return Emitted(files, _command(plan), tuple(notes))


def _command(plan: Plan) -> str:
    # One queue a device keeps communication in front of compute; Megatron-FSDP needs several.
    one_queue = "" if plan.layout.zero_stage >= 2 else "CUDA_DEVICE_MAX_CONNECTIONS=1 "
    return one_queue + torchrun(plan, "train.py")


def _overrides(plan: Plan) -> Mapping[str, Any]:
    layout = plan.layout
    return {
        "model": _model(plan),
        "train": {
            "micro_batch_size": layout.micro_batch,
            "global_batch_size": plan.global_batch,
            "train_iters": plan.steps,
        },
        "validation": {"eval_iters": 0},
        "optimizer": {
            "optimizer": "adam",
            "lr": plan.lr,
            "min_lr": 0.0,
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "clip_grad": 1.0,
            "use_distributed_optimizer": layout.zero_stage > 0,
            "optimizer_cpu_offload": layout.offload == "optimizer",
            "use_precision_aware_optimizer": layout.offload == "optimizer",
        },
        "scheduler": {"lr_decay_style": "cosine", "lr_warmup_iters": plan.warmup},
        "ddp": _sharding(layout),
        "dataset": {"seq_length": plan.seq_len},
        "logger": {"log_interval": 1},
        "checkpoint": {"ckpt_format": "fsdp_dtensor" if layout.zero_stage > 1 else "torch_dist"},
        "mixed_precision": _precision(layout),
    }


def _model(plan: Plan) -> dict[str, Any]:
    arguments = parallel_arguments(plan)
    found = {
        _FIELDS.get(name, name.replace("-", "_")): arguments[name]
        for name in _MODEL_ARGUMENTS
        if name in arguments
    }
    if "recompute_modules" in found:
        found["recompute_modules"] = found["recompute_modules"].split()
    found["seq_length"] = plan.seq_len
    if plan.layout.zero_stage > 1:
        found["gradient_accumulation_fusion"] = False
    return found


def _sharding(layout: Layout) -> dict[str, Any]:
    stage = layout.zero_stage
    found: dict[str, Any] = {
        "use_distributed_optimizer": stage > 0,
        "overlap_grad_reduce": stage > 0,
        "overlap_param_gather": stage > 0,
        "grad_reduce_in_fp32": True,
        "num_distributed_optimizer_instances": layout.dp_replicate if stage else 1,
    }
    if stage > 1:
        strategy = {2: "optim_grads", 3: "optim_grads_params"}[stage]
        found |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
    return found


def _precision(layout: Layout) -> str | None:
    if layout.precision == "fp8":
        return _FP8[layout.fp8_scaling]
    return None if layout.precision == "fp32" else "bf16_mixed"
