"""PyTorch alone: a script that shards a Hugging Face model with `fully_shard`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.plan.emit.abilities import OURS_ALONE, Abilities
from meshwright.plan.emit.plan import Emitted, Plan
from meshwright.plan.emit.text import config_json, heading, torchrun

_ONE = (1,)
LIMITED: Mapping[str, tuple[Any, ...]] = {
    "tp": _ONE,
    "sp": (),
    "cp": _ONE,
    "cp_method": (),
    "pp": _ONE,
    "vpp": (),
    "schedule": (),
    "stages": (),
    "ep": _ONE,
    "etp": (),
    "zero": (2, 3),
    "recompute": ("none", "full"),
    "recompute_parts": (["attention"],),
    "precision": ("fp32", "bf16"),
    "fp8_scaling": (),
    "grad_compression": ("none",),
    "offload": ("none", "optimizer"),
    **OURS_ALONE,
}
ABILITIES = Abilities(
    framework="fsdp2",
    title="a plain FSDP2 script",
    written=frozenset(["dp_replicate", "dp_shard", "micro_batch", "grad_precision", "compile"]),
    limited=LIMITED,
    left_out={},
)

_SCRIPT = '''"""{heading}

Needs torch, transformers and accelerate. Tokens are random: put your own in `batches`.
"""

import math
import os

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import AutoConfig, AutoModelForCausalLM

DP_REPLICATE, DP_SHARD = {dp_replicate}, {dp_shard}
SEQ_LEN, MICRO_BATCH, MICRO_BATCHES = {seq_len}, {micro_batch}, {micro_batches}
STEPS, WARMUP, LR = {steps}, {warmup}, {lr!r}
PARAM_DTYPE, REDUCE_DTYPE = torch.{param_dtype}, torch.{reduce_dtype}
RESHARD_AFTER_FORWARD = {reshard}  # True: ZeRO-3; False: weights stay gathered, ZeRO-2
RECOMPUTE, COMPILE, OFFLOAD = {recompute}, {compile}, {offload}


def build(device):
    """The model in shards; weights are made where they stay, so that none is ever whole."""
    config = AutoConfig.from_pretrained(os.path.dirname(os.path.abspath(__file__)))
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.use_cache = False
    if RECOMPUTE:
        model.gradient_checkpointing_enable({{"use_reentrant": False}})
    mesh = init_device_mesh(
        device.type, (DP_REPLICATE, DP_SHARD), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    options = {{
        "mesh": mesh if DP_REPLICATE > 1 else mesh["dp_shard"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=PARAM_DTYPE, reduce_dtype=REDUCE_DTYPE),
        "reshard_after_forward": RESHARD_AFTER_FORWARD,
        "offload_policy": CPUOffloadPolicy() if OFFLOAD else OffloadPolicy(),
    }}
    for layer in model.base_model.{layers}:
        if COMPILE and device.type == "cuda":
            layer.compile()
        fully_shard(layer, **options)
    fully_shard(model, **options)
    home = torch.device("cpu") if OFFLOAD else device
    # Buffers are real already and used on the device; only weights are still without memory.
    model._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t.to(device))
    torch.manual_seed(0)
    model.apply(model._init_weights)
    model.tie_weights()
    return model.train()


def batches(vocab, device):
    """Endless micro-batches of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        shape = (MICRO_BATCH, SEQ_LEN)
        yield torch.randint(vocab, shape, generator=generator).to(device)


def rate(step):
    """Share of LR: linear warm-up, then cosine to 0."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, STEPS - WARMUP)))


def main():
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    assert dist.get_world_size() == DP_REPLICATE * DP_SHARD, "start as many ranks as the plan has"
    model = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    tokens = batches(model.config.vocab_size, device)
    for step in range(STEPS):
        total = 0.0
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last or RESHARD_AFTER_FORWARD)
            ids = next(tokens)
            loss = model(input_ids=ids, labels=ids).loss / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {{step + 1}} loss {{total:.4f}} gradient norm {{norm.item():.3f}}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


def write(plan: Plan) -> Emitted:
    """`train.py` and the `config.json` that it builds the model from."""
    layout = plan.layout
    script = _SCRIPT.format(
        heading=heading(plan, "PyTorch FSDP2"),
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        seq_len=plan.seq_len,
        micro_batch=layout.micro_batch,
        micro_batches=plan.micro_batches,
        steps=plan.steps,
        warmup=plan.warmup,
        lr=plan.lr,
        param_dtype="bfloat16" if layout.precision == "bf16" else "float32",
        reduce_dtype="bfloat16" if layout.grad_precision == "bf16" else "float32",
        reshard=layout.zero_stage == 3,
        recompute=layout.recompute == "full",
        compile=layout.compile,
        offload=layout.offload == "optimizer",
        layers="h" if plan.spec.family == "gpt2" else "layers",
    )
    notes = ["tokens are random: put your own in `batches`"]
    if layout.offload == "optimizer":
        notes.append("offload = 'optimizer': FSDP2 moves weights and gradients out too")
    files = {"train.py": script, "config.json": config_json(plan.spec)}
    return Emitted(files, torchrun(plan, "train.py"), tuple(notes))
