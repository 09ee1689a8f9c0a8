"""Megatron-LM: a launch script with its arguments, named as in megatron-core 0.19.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.models.spec import ModelSpec
from meshwright.plan.emit.abilities import OURS_ALONE, Abilities, refuse
from meshwright.plan.emit.megatron_model import model_arguments
from meshwright.plan.emit.plan import Emitted, Plan
from meshwright.plan.emit.text import PORT, heading
from meshwright.plan.layout import Layout
from meshwright.plan.stages import stage_layers

Arguments = dict[str, Any]

WRITTEN = frozenset(
    [
        "dp_replicate",
        "dp_shard",
        "tp",
        "sp",
        "cp",
        "cp_method",
        "pp",
        "vpp",
        "ep",
        "etp",
        "zero",
        "stages",
        "micro_batch",
        "recompute_parts",
        "grad_precision",
    ]
)
LIMITED: Mapping[str, tuple[Any, ...]] = {
    "schedule": ("1f1b", "interleaved"),
    "recompute": ("none", "selective", "full"),
    "precision": ("fp32", "bf16", "fp16", "fp8"),
    "fp8_scaling": ("tensor", "block"),
    "grad_compression": ("none",),
    "offload": ("none", "optimizer"),
    **OURS_ALONE,
}
LEFT_OUT = {"compile": "Megatron has kernels of its own where we compile layers"}
ABILITIES = Abilities("megatron", "Megatron-LM", WRITTEN, LIMITED, LEFT_OUT)

_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def write(plan: Plan) -> Emitted:
    """`run.sh`, to be started in a clone of Megatron-LM on every machine."""
    check_combinations(plan)
    groups = {
        "MODEL_ARGS": model_arguments(plan.spec, plan.layout.tp),
        "PARALLEL_ARGS": parallel_arguments(plan),
        "TRAINING_ARGS": _training_arguments(plan),
        "DATA_ARGS": {"mock-data": True, "tokenizer-type": "NullTokenizer", "split": "99,1,0"},
    }
    notes = [*stage_notes(plan), "data is mock data: give --data-path and a tokenizer in its place"]
    notes += model_notes(plan.spec)
    command = "bash run.sh" if plan.nodes == 1 else "HOST=first-machine NODE=0 bash run.sh"
    return Emitted({"run.sh": _script(plan, groups)}, command, tuple(notes))


def check_combinations(plan: Plan) -> None:
    """What two keys together rule out. Raises ConfigError naming both and the way out."""
    layout = plan.layout
    if layout.schedule == "interleaved" and layout.pp == 2:
        fix = "Megatron interleaves over 3 or more pipeline ranks; raise pp, or schedule = '1f1b'"
        raise refuse("pp", 2, fix)
    if layout.cp > 1 and layout.cp_method == "ulysses" and plan.seq_len % (2 * layout.cp):
        raise ConfigError(
            "data.seq_len", plan.seq_len, f"Megatron needs a multiple of 2 x cp = {2 * layout.cp}"
        )
    if layout.zero_stage >= 2 and layout.precision == "fp16":
        fix = "Megatron-FSDP trains in bf16; set precision = 'bf16' or zero = 1"
        raise refuse("zero", layout.zero_stage, fix)
    if layout.zero_stage >= 2 and layout.offload != "none":
        fix = "Megatron-FSDP keeps the optimizer on the chip; set offload = 'none' or zero = 1"
        raise refuse("offload", layout.offload, fix)


def parallel_arguments(plan: Plan) -> Arguments:
    """Axes, sharding, pipeline, recomputation, precision."""
    layout = plan.layout
    found: Arguments = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "micro-batch-size": layout.micro_batch,
        "global-batch-size": plan.global_batch,
    }
    if layout.sequence_parallel:
        found["sequence-parallel"] = True
    if layout.cp > 1:
        found["cp-comm-type"] = {"ring": "p2p", "ulysses": "a2a"}[layout.cp_method]
    if plan.spec.n_experts:
        found["expert-model-parallel-size"] = layout.ep
        found["expert-tensor-parallel-size"] = layout.etp
    return found | _stages(plan) | _sharding(layout) | _precision(layout) | _recompute(plan)


def _stages(plan: Plan) -> Arguments:
    """Layers of a stage: evenly where nothing else is asked for and they divide."""
    layout = plan.layout
    if layout.pp == 1:
        return {}
    sizes = stage_sizes(plan)
    if len(set(sizes)) == 1:
        vpp = {"num-virtual-stages-per-pipeline-rank": layout.vpp} if layout.vpp > 1 else {}
        return vpp
    middle = set(sizes[1:-1])
    if layout.vpp == 1 and len(middle) == 1 and all(sizes):
        first, last = sizes[0], sizes[-1]
        found: Arguments = {}
        if first not in middle:
            found["decoder-first-pipeline-num-layers"] = first
        if last not in middle:
            found["decoder-last-pipeline-num-layers"] = last
        return found
    return {"pipeline-model-parallel-layout": _drawn(sizes)}


def stage_sizes(plan: Plan) -> list[int]:
    """Layers of each stage: as the plan says, else evenly, else by cost."""
    layout, layers = plan.layout, plan.spec.layers
    if not layout.stages and layers % layout.virtual_stages == 0:
        return [layers // layout.virtual_stages] * layout.virtual_stages
    return [len(stage) for stage in stage_layers(plan.spec, layout, plan.seq_len)]


def stage_notes(plan: Plan) -> list[str]:
    """That stages are not as our own trainer would cut them."""
    ours = [len(stage) for stage in stage_layers(plan.spec, plan.layout, plan.seq_len)]
    if plan.layout.pp == 1 or ours == stage_sizes(plan):
        return []
    return [f"stages have {stage_sizes(plan)[0]} layers each; by cost they would have {ours}"]


def _drawn(sizes: list[int]) -> str:
    """`Et*3|t*4|t*2L`: embedding, layers of each stage, loss."""
    stages = ["t" * (size == 1) if size < 2 else f"t*{size}" for size in sizes]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return "|".join(stages)


def _sharding(layout: Layout) -> Arguments:
    stage = layout.zero_stage
    if stage == 0:
        return {}
    found: Arguments = {"use-distributed-optimizer": True}
    if layout.dp_replicate > 1:
        found["num-distributed-optimizer-instances"] = layout.dp_replicate
    if stage == 1:
        return {**found, "overlap-grad-reduce": True, "overlap-param-gather": True}
    return {
        **found,
        "use-megatron-fsdp": True,
        "data-parallel-sharding-strategy": _STRATEGIES[stage],
        "no-gradient-accumulation-fusion": True,
        "ckpt-format": "fsdp_dtensor",
    }


def _precision(layout: Layout) -> Arguments:
    found: Arguments = {}
    if layout.precision != "fp32":
        found["fp16" if layout.precision == "fp16" else "bf16"] = True
    if layout.precision == "fp8":
        block = layout.fp8_scaling == "block"
        found["fp8-format"] = "e4m3" if block else "hybrid"
        found["fp8-recipe"] = "blockwise" if block else "tensorwise"
    if layout.grad_precision == "bf16":
        found["grad-reduce-in-bf16"] = True
    if layout.offload == "optimizer":
        found |= {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}
    return found


def _recompute(plan: Plan) -> Arguments:
    layout = plan.layout
    if layout.recompute == "none":
        return {}
    if layout.recompute == "full":
        return {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
        }
    modules = {"attention": ["core_attn"], "mlp": ["mlp"]}
    if plan.spec.n_experts:
        modules["mlp"] = ["moe", "mlp"] if plan.spec.first_dense_layers else ["moe"]
    named = [module for part in layout.recompute_parts for module in modules[part]]
    return {"recompute-granularity": "selective", "recompute-modules": " ".join(named)}


def _training_arguments(plan: Plan) -> Arguments:
    return {
        "seq-length": plan.seq_len,
        "train-iters": plan.steps,
        "lr": plan.lr,
        "lr-warmup-iters": plan.warmup,
        "lr-decay-style": "cosine",
        "weight-decay": 0.1,
        "adam-beta2": 0.95,
        "clip-grad": 1.0,
        "log-interval": 1,
        "eval-iters": 0,
    }


def model_notes(spec: ModelSpec) -> list[str]:
    """What the model means there besides."""
    if not spec.n_experts or spec.capacity_factor:
        return []
    return ["experts take all their tokens, without a capacity, as in the plan"]


def _script(plan: Plan, groups: Mapping[str, Arguments]) -> str:
    lines = ["#!/bin/bash", *(f"# {line}" for line in heading(plan, "Megatron-LM").splitlines())]
    if plan.nodes > 1:
        lines.append("# On every machine: HOST=first-machine NODE=its-number bash run.sh")
    # One queue a device keeps communication in front of compute; Megatron-FSDP needs several.
    fsdp = plan.layout.zero_stage >= 2
    connections = "unset" if fsdp else "export"
    lines += ["", f"{connections} CUDA_DEVICE_MAX_CONNECTIONS{'' if fsdp else '=1'}", ""]
    launch: Arguments = {"nproc-per-node": plan.per_node, "nnodes": plan.nodes}
    if plan.nodes > 1:
        launch |= {"node-rank": "${NODE}", "master-addr": "${HOST}", "master-port": PORT}
    for name, arguments in {"LAUNCH_ARGS": launch, **groups}.items():
        lines += [f"{name}=(", *(f"    {_argument(*item)}" for item in arguments.items()), ")"]
    # Quoted: a shell may take `([0]*3+[1]*58)` for names of files.
    named = " ".join(f'"${{{name}[@]}}"' for name in groups)
    lines += ["", f'torchrun "${{LAUNCH_ARGS[@]}}" pretrain_gpt.py {named}']
    return "\n".join(lines) + "\n"


def _argument(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    quoted = any(character in str(value) for character in "()[]*|")
    return f"--{name} '{value}'" if quoted else f"--{name} {value}"
