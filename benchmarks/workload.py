"""What every benchmark trains: small Llamas, on the bytes of Python's own library, with AdamW."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.base.events import WorkerContext
from meshwright.models import presets
from meshwright.models.spec import ModelSpec
from meshwright.plan.data_section import DataSection
from meshwright.plan.job import Job, JobSection, OptimizerSection
from meshwright.plan.layout import Layout
from meshwright.train.init import initial_values
from meshwright.train.nn.decoder import Decoder
from meshwright.train.nn.passing import Pass

SEED = 0
_CORPUS_FILES = 60


@dataclass(frozen=True)
class Load:
    """The work of one step: `global_batch` sequences of `seq_len` tokens."""

    model: str
    global_batch: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Target tokens of one step."""
        return self.global_batch * self.seq_len


def model_spec(name: str) -> ModelSpec:
    """`tiny` is the quickstart's preset, `10m` a Llama of 9.8 million parameters."""
    if name != "10m":
        return presets.preset(name)
    return ModelSpec(
        family="llama",
        layers=6,
        hidden=384,
        heads=6,
        kv_heads=2,
        ffn_hidden=1024,
        vocab=1024,
        tie_embeddings=True,
    )


def build_job(load: Load, layout: Layout, steps: int) -> Job:
    """A job of ours for `load`, its learning rate constant as the peers have it."""
    return Job(
        job=JobSection(steps=steps, seed=SEED),
        model=model_spec(load.model),
        data=DataSection(seq_len=load.seq_len, global_batch=load.global_batch),
        layout=layout,
        optimizer=OptimizerSection(lr=1e-3, min_lr=1e-3),
    )


def batches(load: Load, steps: int) -> Tensor:
    """Byte tokens [steps, global_batch, seq_len + 1] at random places of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:_CORPUS_FILES]
    corpus = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)
    draw = torch.Generator().manual_seed(SEED)
    length = load.seq_len + 1
    shape = (steps, load.global_batch, 1)
    start = torch.randint(len(corpus) - length, shape, generator=draw)
    tokens: Tensor = corpus[start + torch.arange(length)].long()
    return tokens


class PlainModel(Decoder):
    """The modules of our trainer without its parallelism: tokens [batch, seq] to logits."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override] # a model of its own
        """Logits [batch, seq, vocab]."""
        order = torch.arange(tokens.shape[1])
        about = Pass(self.rope_at(order), order)
        return F.linear(super().forward(tokens, about), self.head_weight)


def plain_model(spec: ModelSpec) -> PlainModel:
    """A plain model with the weights that our trainer begins with."""
    model = PlainModel(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = initial_values(spec, SEED, name, torch.arange(parameter.numel()))
            parameter.copy_(values.view_as(parameter))
    return model


def plain_adamw(
    parameters: Iterable[torch.nn.Parameter], settings: OptimizerSection
) -> torch.optim.AdamW:
    """torch's fastest AdamW, with our settings: no decay on norms."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
    )


def worker_context(rank: int, world: int, port: int, store_fd: int | None) -> WorkerContext:
    """What our launcher would tell this process; its messages go nowhere."""
    return WorkerContext(rank, world, port, store_fd, event_fd=os.open(os.devnull, os.O_WRONLY))
