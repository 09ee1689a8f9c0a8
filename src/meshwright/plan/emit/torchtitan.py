"""torchtitan 0.3: a module with a config function, which that release reads in place of TOML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.models import presets
from meshwright.models.spec import ModelSpec
from meshwright.plan.emit.abilities import OURS_ALONE, Abilities, refuse
from meshwright.plan.emit.plan import Emitted, Plan
from meshwright.plan.emit.text import heading, settings, torchrun
from meshwright.plan.layout import expert_lanes
from meshwright.plan.stages import stage_layers

# Preset here; module and flavor there, of the same shape in 0.2.2 and 0.3.0.
FLAVORS: Mapping[str, tuple[str, str]] = {
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-405b": ("llama3", "405B"),
    "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-32b": ("qwen3", "32B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
    "deepseek-v2-lite": ("deepseek_v3", "16B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
}
# Keys that a flavor leaves to the job, or that torchtitan sets by itself.
_NOT_SHAPE = [
    "max_seq_len",
    "dropout",
    "hf",
    "aux_loss",
    "seq_aux_loss",
    "z_loss",
    "bias_update_rate",
    "norm_eps",
]

WRITTEN = frozenset(
    [
        "dp_replicate",
        "dp_shard",
        "tp",
        "cp",
        "pp",
        "vpp",
        "ep",
        "etp",
        "stages",
        "schedule",
        "micro_batch",
        "compile",
    ]
)
LIMITED: Mapping[str, tuple[Any, ...]] = {
    "cp_method": ("ring",),
    "zero": (0, 2, 3),
    "recompute": ("none", "selective", "full"),
    "recompute_parts": (["attention"],),
    "precision": ("fp32", "bf16", "fp8"),
    "fp8_scaling": ("row", "block"),
    "grad_precision": ("fp32",),
    "grad_compression": ("none",),
    "offload": ("none", "optimizer"),
    **OURS_ALONE,
}
ABILITIES = Abilities("torchtitan", "torchtitan 0.3", WRITTEN | {"sp"}, LIMITED, {})

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_RECOMPUTE = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}

_MODULE = '''{heading}

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
{quantization}from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: F401
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.{module} import model_registry
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer


def train() -> Trainer.Config:
    """What `--module meshwright_titan --config train` builds."""
    spec = model_registry("{flavor}"{converters})
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path="./assets/hf/{flavor}",
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        optimizer=default_adamw(lr={lr!r}),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps={warmup}, decay_ratio=None, decay_type="cosine", min_lr_factor=0.0
        ),
        training=TrainingConfig(
{training}
        ),
        parallelism=ParallelismConfig(
{parallelism}
        ),
        activation_checkpoint={recompute},
        compile=CompileConfig(enable={compile}),
    )
'''


def write(plan: Plan) -> Emitted:
    """`meshwright_titan.py`, to be on the path of torchtitan's entry."""
    check_combinations(plan)
    module, flavor = flavor_of(plan.spec)
    layout = plan.layout
    if plan.spec.n_experts and layout.ep > 1 and layout.etp > 1:
        fix = "torchtitan 0.3 does not cut experts that it shares out; set etp = 1, or ep = 1"
        raise refuse("etp", layout.etp, fix)
    quantization, converters = _quantization(plan)
    text = _MODULE.format(
        heading=f'"""{heading(plan, "torchtitan 0.3")}"""',
        module=module,
        flavor=flavor,
        quantization=quantization,
        converters=converters,
        lr=plan.lr,
        warmup=plan.warmup,
        training=settings(_training(plan), " " * 12),
        parallelism=settings(parallelism(plan, "lm_head"), " " * 12),
        recompute=_RECOMPUTE[layout.recompute],
        compile=layout.compile,
    )
    start = torchrun(plan, "-m torchtitan.train --module meshwright_titan --config train")
    return Emitted({"meshwright_titan.py": text}, f"PYTHONPATH=. {start}", notes(plan))


def flavor_of(spec: ModelSpec) -> tuple[str, str]:
    """Module and flavor of the same shape. Raises ConfigError where there is none."""
    ours = _shape(spec)
    for name, flavor in FLAVORS.items():
        if _shape(presets.preset(name)) == ours:
            return flavor
    raise ConfigError(
        "model",
        f"{spec.family} of {spec.params / 1e9:.3g} billion weights",
        f"torchtitan has no flavor of this shape, only those of {', '.join(FLAVORS)}; "
        "write it for megatron, fsdp2 or deepspeed, which take any shape",
    )


def _shape(spec: ModelSpec) -> dict[str, Any]:
    return {
        key: value
        for key, value in spec.model_dump().items()
        if key not in _NOT_SHAPE and (not key.startswith("rope_") or key == "rope_theta")
    }


def check_combinations(plan: Plan) -> None:
    """What two keys together rule out. Raises ConfigError naming both and the way out."""
    layout = plan.layout
    if layout.zero_stage == 0 and layout.cp > 1:
        fix = f"torchtitan always shards over dp_shard x cp, and cp = {layout.cp}; set zero = 3"
        raise refuse("zero", 0, fix)
    if layout.zero_stage and layout.zero_stage != 3 and layout.dp_shard * layout.cp == 1:
        raise refuse("zero", layout.zero_stage, "there is nothing to shard; leave zero out")
    if layout.ep > 1 and expert_lanes(layout) % layout.ep:
        fix = (
            f"does not divide dp_shard x cp x tp = {expert_lanes(layout)}, over which torchtitan "
            "puts experts; lower ep, or move ranks from dp_replicate to dp_shard"
        )
        raise refuse("ep", layout.ep, fix)
    if plan.spec.n_experts and layout.ep == 1 and layout.etp != layout.tp:
        fix = f"without ep torchtitan cuts experts as all else; set etp = {layout.tp}, or ep > 1"
        raise refuse("etp", layout.etp, fix)
    if layout.offload != "none" and not layout.zero_stage:
        raise refuse("offload", layout.offload, "torchtitan offloads what FSDP shards; set zero")


def parallelism(plan: Plan, head: str) -> dict[str, Any]:
    """Keys of the parallelism section; `head` is the name of the output head's module."""
    layout = plan.layout
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.dp_shard,
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.zero_stage:
        found["fsdp_reshard_after_forward"] = "never" if layout.zero_stage == 2 else "always"
    if head == "lm_head":
        found["enable_sequence_parallel"] = layout.sp
    if plan.spec.n_experts:
        found["expert_parallel_degree"] = layout.ep
    if layout.pp == 1:
        return found
    return found | {
        "pipeline_parallel_schedule": SCHEDULES[layout.schedule],
        "pipeline_parallel_microbatch_size": layout.micro_batch,
        **_stages(plan, head),
    }


def _stages(plan: Plan, head: str) -> dict[str, Any]:
    """Modules of each stage. The number of stages follows from the layers of one, rounded up."""
    layout = plan.layout
    stages = [
        [f"layers.{layer}" for layer in layers]
        for layers in stage_layers(plan.spec, layout, plan.seq_len)
    ]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", head]
    per_stage = -(-plan.spec.layers // layout.virtual_stages)
    if -(-plan.spec.layers // per_stage) != layout.virtual_stages:
        fix = (
            f"torchtitan cannot count {layout.virtual_stages} stages of {plan.spec.layers} layers "
            f"from {per_stage} layers a stage; change pp or vpp"
        )
        raise refuse("pp", layout.pp, fix)
    return {
        "pipeline_parallel_layers_per_stage": per_stage,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
        "module_fqns_per_model_part": stages,
    }


def batch(plan: Plan) -> dict[str, int]:
    """A pipeline gets the whole batch of a rank and cuts it; else it comes in micro-batches."""
    local = plan.local_batch if plan.layout.pp > 1 else plan.layout.micro_batch
    return {"local_batch_size": local, "global_batch_size": plan.global_batch}


def _training(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    return {
        **batch(plan),
        "seq_len": plan.seq_len,
        "steps": plan.steps,
        "max_norm": 1.0,
        "enable_cpu_offload": layout.offload == "optimizer",
        "mixed_precision_param": "float32" if layout.precision == "fp32" else "bfloat16",
        # Captured graphs allow neither a pipeline nor experts' dispatch.
        "disable_cuda_graphs": True,
    }


def _quantization(plan: Plan) -> tuple[str, str]:
    """The import and the argument that make linear layers compute in fp8."""
    layout = plan.layout
    if layout.precision != "fp8":
        return "", ""
    name, skip = "Float8LinearConverter", "filter_fqns=['lm_head']"
    if layout.fp8_scaling == "block":
        name, skip = "MXFP8LinearConverter", "fqns=['layers']"
    made = f"{name}.Config(model_compile_enabled={layout.compile}, {skip})"
    return (
        f"from torchtitan.components.quantization import {name}\n",
        f", converters=[{made}]",
    )


def notes(plan: Plan) -> tuple[str, ...]:
    """What means something else there."""
    layout, found = plan.layout, ["dataset and tokenizer are torchtitan's: c4, and hf_assets_path"]
    if layout.recompute == "selective":
        found.append(
            "recompute = 'selective': torchtitan keeps what is costly and recomputes the "
            "rest, not only attention"
        )
    if layout.offload == "optimizer":
        found.append("offload = 'optimizer': torchtitan moves weights and gradients out too")
    if plan.spec.n_experts and (plan.spec.aux_loss or plan.spec.seq_aux_loss or plan.spec.z_loss):
        found.append("torchtitan balances experts by a bias, without a loss")
    # Its Llama 3 is that of 3.1, stretched eightfold; no key of the job changes that.
    stretched = plan.spec.family == "llama" or plan.spec.rope_scaling != "none"
    if stretched or plan.spec.norm_eps != 1e-5:
        found.append("rotary scaling and the norms' epsilon are those of torchtitan's flavor")
    return tuple(found)
