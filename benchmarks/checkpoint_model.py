"""A GPT in training by AdamW: the state that checkpoints are taken of, and its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT, BATCH = 64, 2
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


class Layer(nn.Module):
    """Causal attention, then a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Any batch of rows."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        moved: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return moved


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows of CONTEXT bytes."""
        hidden = self.layers(self.table(ids) + self.places.weight)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


@dataclass
class Training:
    """`state` holds each parameter as `param/NAME` and its moments as `adamw.m/NAME` and
    `adamw.v/NAME`, all fp32; `updates` is how many steps have been made."""

    model: Gpt
    text: Tensor
    state: dict[str, Tensor]
    updates: int = 0

    @classmethod
    def fresh(cls, width: int, layers: int, text: Path) -> Training:
        """At step 0, always with the same numbers."""
        torch.manual_seed(0)
        model = Gpt(width, layers)
        ids = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
        state = {f"param/{name}": p.detach() for name, p in model.named_parameters()}
        for kind in ("adamw.m", "adamw.v"):
            state |= {f"{kind}/{n}": torch.zeros_like(p) for n, p in model.named_parameters()}
        return cls(model, ids, state)

    @property
    def bytes(self) -> int:
        """Of the state."""
        return sum(tensor.nbytes for tensor in self.state.values())

    def step(self, before_update: Callable[[], None] = lambda: None) -> float:
        """One step: the seconds that `before_update` took, called before the state changes."""
        chance = torch.Generator().manual_seed(self.updates)
        starts = torch.randint(0, len(self.text) - CONTEXT - 1, (BATCH,), generator=chance)
        rows = torch.stack([self.text[start : start + CONTEXT + 1] for start in starts.tolist()])
        logits = self.model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        grads = torch.autograd.grad(loss, list(self.model.parameters()))
        start = time.perf_counter()
        before_update()
        waited_s = time.perf_counter() - start
        self.updates += 1
        moments = list(self._moments())
        with torch.no_grad():
            torch._fused_adamw_(
                list(self.model.parameters()),
                list(grads),
                [m for m, _ in moments],
                [v for _, v in moments],
                [],
                [torch.tensor(float(self.updates)) for _ in grads],
                lr=LR,
                beta1=BETAS[0],
                beta2=BETAS[1],
                weight_decay=DECAY,
                eps=EPS,
                amsgrad=False,
                maximize=False,
            )
        return waited_s

    def _moments(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, _ in self.model.named_parameters():
            yield self.state[f"adamw.m/{name}"], self.state[f"adamw.v/{name}"]

    def keep(self, path: Path) -> None:
        """Write where training stands, for `resume`."""
        torch.save((self.updates, self.state), path)

    def resume(self, path: Path) -> None:
        """Go on from what `keep` wrote."""
        self.updates, kept = torch.load(path, mmap=True)
        for name, tensor in kept.items():
            self.state[name].copy_(tensor)
