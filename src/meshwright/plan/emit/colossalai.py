"""ColossalAI: a script around HybridParallelPlugin, arguments as in 0.5.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.plan.emit.abilities import OURS_ALONE, Abilities, refuse
from meshwright.plan.emit.plan import Emitted, Plan
from meshwright.plan.emit.text import config_json, heading, settings, torchrun
from meshwright.plan.stages import stage_layers

LIMITED: Mapping[str, tuple[Any, ...]] = {
    "schedule": ("1f1b", "interleaved", "zbv"),
    "zero": (0, 1, 2),
    "recompute": ("none", "full"),
    "recompute_parts": (["attention"],),
    "precision": ("fp32", "bf16", "fp16", "fp8"),
    "fp8_scaling": ("tensor",),
    "grad_precision": ("fp32", "bf16"),
    "grad_compression": ("none",),
    "offload": ("none", "optimizer"),
    **OURS_ALONE,
}
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
        "stages",
        "micro_batch",
    ]
)
ABILITIES = Abilities(
    framework="colossalai",
    title="ColossalAI",
    written=WRITTEN,
    limited=LIMITED,
    left_out={
        "compile": "ColossalAI has fused kernels where we compile layers",
        "etp": "follows tp",
    },
)

# Families with a sharding policy (colossalai/shardformer/policies); experts need the MoE plugin.
_FAMILIES = ("llama", "gpt2")
_EXPERT_FAMILIES = ("mixtral", "deepseek_v3")

_SCRIPT = '''"""{heading}

Needs colossalai 0.5.0 with its own torch and transformers. Tokens are random.
"""

import os

import colossalai
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import {plugin}
from colossalai.lazy import LazyInitContext
from colossalai.nn.optimizer import HybridAdam
from transformers import AutoConfig, AutoModelForCausalLM

SEQ_LEN, LOCAL_BATCH, MICRO_BATCH = {seq_len}, {local_batch}, {micro_batch}
STEPS, LR, PIPELINE = {steps}, {lr!r}, {pipeline}


def plugin():
    """The layout."""
{before}    return {plugin}(
{settings}
    )


class Tokens(torch.utils.data.Dataset):
    """Random tokens; put your own here."""

    def __init__(self, vocab):
        self.vocab = vocab

    def __len__(self):
        return {global_batch} * STEPS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(self.vocab, (SEQ_LEN,), generator=generator)
        return {{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}}


def main():
    colossalai.launch_from_torch()
    chosen = plugin()
    booster = Booster(plugin=chosen)
    config = AutoConfig.from_pretrained(os.path.dirname(os.path.abspath(__file__)))
    with LazyInitContext(default_device=torch.device("cuda")):
        model = AutoModelForCausalLM.from_config(config)
    if {recompute}:
        model.gradient_checkpointing_enable({{"use_reentrant": False}})
    optimizer = HybridAdam(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    batch = LOCAL_BATCH if PIPELINE else MICRO_BATCH
    loader = chosen.prepare_dataloader(Tokens(config.vocab_size), batch_size=batch, drop_last=True)
    model, optimizer, _, loader, schedule = booster.boost(
        model, optimizer, dataloader=loader, lr_scheduler=schedule
    )
    data = iter(loader)
    for step in range(STEPS):
        loss = pipelined(booster, model, optimizer, data) if PIPELINE else plain(
            booster, model, optimizer, data
        )
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if loss is not None and dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {{step + 1}} loss {{loss:.4f}}")


def pipelined(booster, model, optimizer, data):
    """The plugin cuts the batch of a rank into micro-batches; the last stage has the loss."""
    outputs = booster.execute_pipeline(
        data, model, lambda out, _: out.loss, optimizer, return_loss=True
    )
    return None if outputs["loss"] is None else outputs["loss"].item()


def plain(booster, model, optimizer, data):
    """Micro-batches one after another."""
    total, pieces = 0.0, LOCAL_BATCH // MICRO_BATCH
    for _ in range(pieces):
        batch = {{name: tensor.cuda() for name, tensor in next(data).items()}}
        loss = model(**batch).loss / pieces
        booster.backward(loss, optimizer)
        total += loss.item()
    return total


if __name__ == "__main__":
    main()
'''

_ZBV = """    from colossalai.pipeline.schedule.v_schedule import PipelineGraph

    graph = PipelineGraph(
        n_stage={stages}, n_micro={micros},
        f_cost=1, b_cost=1, w_cost=1, c_cost=0, f_mem=2, b_mem=-1, w_mem=-1,
    )
"""


def write(plan: Plan) -> Emitted:
    """`train.py` and `config.json`."""
    _check(plan)
    moe = plan.spec.n_experts > 0
    values = settings(_settings(plan), " " * 8)
    before = ""
    if plan.layout.pp > 1 and plan.layout.schedule == "zbv":
        before = _ZBV.format(stages=plan.layout.pp, micros=plan.micro_batches)
        values += "\n        scheduler_nodes=graph.get_v_schedule(),"
    script = _SCRIPT.format(
        heading=heading(plan, "ColossalAI"),
        plugin="MoeHybridParallelPlugin" if moe else "HybridParallelPlugin",
        seq_len=plan.seq_len,
        local_batch=plan.local_batch,
        micro_batch=plan.layout.micro_batch,
        global_batch=plan.global_batch,
        steps=plan.steps,
        lr=plan.lr,
        pipeline=plan.layout.pp > 1,
        before=before,
        settings=values,
        recompute=plan.layout.recompute == "full",
    )
    files = {"train.py": script, "config.json": config_json(plan.spec)}
    return Emitted(files, torchrun(plan, "train.py"), tuple(_notes(plan)))


def _check(plan: Plan) -> None:
    spec, layout = plan.spec, plan.layout
    known = _EXPERT_FAMILIES if spec.n_experts else _FAMILIES
    if spec.family not in known:
        fix = f"ColossalAI shards {', '.join(_FAMILIES + _EXPERT_FAMILIES)}; write it for megatron"
        raise ConfigError("model.family", spec.family, fix)
    stage = layout.zero_stage
    if stage and layout.dp_replicate > 1:
        fix = f"ColossalAI shards ZeRO-{stage} over all replicas; set dp_replicate = 1"
        raise refuse("dp_replicate", layout.dp_replicate, fix)
    if stage == 2 and (layout.pp > 1 or spec.n_experts):
        fix = "ColossalAI's pipeline and its experts take ZeRO-0 or 1; set zero = 1"
        raise refuse("zero", stage, fix)
    if layout.cp > 1 and layout.sequence_parallel:
        fix = "ColossalAI splits the sequence over cp or over tp, not both; set sp = false"
        raise refuse("sp", True, fix)
    if spec.n_experts and layout.tp > 1 and layout.etp != layout.tp:
        fix = f"ColossalAI cuts experts as all else; set etp = {layout.tp}"
        raise refuse("etp", layout.etp, fix)
    if spec.n_experts and layout.cp > 1 and layout.cp_method == "ring":
        fix = "ColossalAI's MoE plugin has no ring; set cp_method = 'ulysses'"
        raise refuse("cp_method", "ring", fix)
    if layout.stages and layout.chunks > 1:
        fix = "ColossalAI counts layers by rank, not by chunk; leave stages out"
        raise refuse("stages", layout.stages, fix)
    if spec.n_experts and layout.dp * layout.cp % layout.ep:
        fix = f"must divide dp x cp = {layout.dp * layout.cp} for ColossalAI"
        raise refuse("ep", layout.ep, fix)


def _settings(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    precision = "bf16" if layout.precision == "fp8" else layout.precision
    found: dict[str, Any] = {"tp_size": layout.tp, "pp_size": layout.pp}
    if plan.spec.n_experts:
        found["ep_size"] = layout.ep
    found |= {
        "precision": precision,
        "use_fp8": layout.precision == "fp8",
        "zero_stage": layout.zero_stage,
        "cpu_offload": layout.offload == "optimizer",
        "enable_flash_attention": True,
        "max_norm": 1.0,
        "make_vocab_size_divisible_by": 1,
    }
    return found | _sequence(plan) | _pipeline(plan)


def _sequence(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    if layout.cp > 1:
        mode = {"ring": "ring_attn", "ulysses": "all_to_all"}[layout.cp_method]
        found = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}
        return {**found, "sp_size": layout.cp}
    if layout.sequence_parallel:
        return {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
    return {}


def _pipeline(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    if layout.pp == 1:
        return {}
    found: dict[str, Any] = {
        "pp_style": layout.schedule,
        "microbatch_size": layout.micro_batch,
        "num_microbatches": plan.micro_batches,
        "num_model_chunks": layout.chunks,
    }
    if layout.chunks == 1:
        stages = stage_layers(plan.spec, layout, plan.seq_len)
        found["num_layers_per_stage"] = [len(stage) for stage in stages]
    return found


def _notes(plan: Plan) -> list[str]:
    layout = plan.layout
    found = ["tokens are random: put your own in `Tokens`"]
    if layout.pp > 1 and layout.chunks > 1:
        found.append("ColossalAI cuts the layers of interleaved stages evenly by itself")
    if layout.schedule == "zbv" and layout.pp > 1:
        found.append("the zero-bubble schedule is made for equal forward, input and weight steps")
    if layout.offload == "optimizer" and layout.zero_stage == 0:
        found.append("offload = 'optimizer' moves only what ZeRO shards")
    return found
