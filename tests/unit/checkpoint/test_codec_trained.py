"""On the steps of a model in training, the update codec reaches what it is for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.checkpoint.codec import Moments, Update, decode_update, encode_change, encode_update
from meshwright.plan.job import OptimizerSection
from meshwright.train.optim import MasterOptimizer

TEXT = Path(__file__).parents[3] / "docs"
LENGTH, WIDTH = 64, 64
SETTINGS = OptimizerSection(lr=2e-3)


class Layer(nn.Module):
    """Causal attention, then a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        moved: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return moved


@dataclass(frozen=True)
class Group:
    """All parameters as one flat master."""

    master: Tensor
    grad: Tensor
    decay_size: int


def steps_of_training(count: int) -> list[tuple[Moments, int]]:
    """State and number of updates after each step, of a byte-level GPT on our own documents."""
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(TEXT.rglob("*.md")))
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    table, places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
    model = nn.Sequential(table, Layer(), Layer(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
    params = [*model.parameters(), *places.parameters()]
    master = torch.cat([p.detach().flatten() for p in params])
    group = Group(master, torch.zeros_like(master), len(master))
    optimizer, seen, at = MasterOptimizer([group], SETTINGS), [], 0
    for param in params:  # they live in the master, as shards of a run do
        param.data = master[at : at + param.numel()].view_as(param)
        at += param.numel()
    for _ in range(count):
        starts = torch.randint(0, len(ids) - LENGTH - 1, (8,)).tolist()
        rows = torch.stack([ids[start : start + LENGTH + 1] for start in starts])
        hidden = table(rows[:, :-1]) + places.weight
        logits = model[1:](hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        group.grad.copy_(torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)]))
        optimizer.step(SETTINGS.lr, divisor=3.0)
        held = (master, *optimizer.moments[0])
        moments = Moments(*(tensor.numpy().copy() for tensor in held))
        seen.append((moments, optimizer.updates_done))
    return seen


def test_three_steps_of_a_model_take_less_than_a_third() -> None:
    seen = steps_of_training(30)[-4:]
    raw = kept = 0
    for (old, _), (new, done) in pairwise(seen):
        decay = SETTINGS.weight_decay
        update = Update(SETTINGS.lr, *SETTINGS.betas, SETTINGS.eps, decay, done)
        body = encode_update(new, old, update)
        back = decode_update(body, old)
        for name, array in vars(new).items():
            assert np.array_equal(vars(back)[name].view("u4"), array.view("u4"))
        raw, kept = raw + 3 * new.m.nbytes, kept + len(body)
    assert raw / kept > 3.2
    (old, _), (new, _) = seen[-2:]
    generic = sum(len(encode_change(vars(new)[name], vars(old)[name])) for name in vars(new))
    assert kept / 3 < 0.5 * generic
