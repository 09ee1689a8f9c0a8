"""What a step teaches the routers: loads, and the biases that even them out."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.base.events import ExpertLoad
from meshwright.models.spec import ModelSpec
from meshwright.plan.experts import imbalance
from meshwright.train.mesh import Mesh
from meshwright.train.nn.decoder import Decoder
from meshwright.train.nn.moe import MoE

_MOST_LISTED = 256  # experts whose counts fit into one message


class Routing:
    """The routers of this rank's stages.

    Counts of a step are summed over every rank that saw other tokens; integers, so that neither
    loads nor biases depend on the layout.
    """

    def __init__(self, stages: dict[int, Decoder], spec: ModelSpec, mesh: Mesh) -> None:
        self.layers: dict[int, MoE] = {
            layer: block.mlp
            for model in stages.values()
            for layer, block in model.blocks.items()
            if isinstance(block.mlp, MoE)
        }
        self._spec, self._mesh = spec, mesh
        self._counts: dict[int, Tensor] = {}
        self.seeded = False

    @property
    def needs_seed(self) -> bool:
        """Whether the balance loss has no loads to go by yet."""
        return self._spec.aux_loss > 0 and not self.seeded

    def begin_step(self) -> None:
        """Count from zero."""
        for moe in self.layers.values():
            moe.router.counts.zero_()

    def sum_counts(self) -> None:
        """Every rank's counts become those of the whole step."""
        if self.layers:
            packed = torch.stack([moe.router.counts for moe in self.layers.values()])
            self._mesh.lanes.all_reduce(packed)
            self._counts = dict(zip(self.layers, packed, strict=True))

    @property
    def packed_counts(self) -> Tensor | None:
        """Assignments of the last step, int64 [layers, experts]; None without experts."""
        return torch.stack(list(self._counts.values())) if self._counts else None

    def learn_from(self, packed: Tensor) -> None:
        """`learn` from the `packed_counts` of another rank of the stage."""
        self.expect(packed)
        self.learn()

    def expect(self, packed: Tensor) -> None:
        """Take `packed_counts` for those of the step under way."""
        self._counts = dict(zip(self.layers, packed, strict=True))

    def seed(self) -> None:
        """Loads of the first step, from a forward pass over its own tokens."""
        for layer, moe in self.layers.items():
            moe.router.load.copy_(self._counts[layer] / self._counts[layer].sum())
        self.seeded = True

    def learn(self) -> None:
        """Loads and biases of the next step follow from the counts of this one."""
        for layer, moe in self.layers.items():
            moe.router.end_step(self._counts[layer])
        self.seeded = True

    def counts(self) -> dict[int, list[int]]:
        """Assignments of the last step by layer and expert, over all ranks."""
        return {layer: counts.tolist() for layer, counts in self._counts.items()}

    def loads(self, step: int) -> list[ExpertLoad]:
        """The loads of the last step, which was `step`, layer by layer."""
        return [
            ExpertLoad(
                step=step,
                layer=layer,
                imbalance=max(counts) * len(counts) / max(sum(counts), 1),
                chip_imbalance=imbalance(counts, self.layers[layer].placement),
                hottest=counts.index(max(counts)),
                counts=tuple(counts) if len(counts) <= _MOST_LISTED else (),
            )
            for layer, counts in self.counts().items()
        ]

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must keep, by name."""
        return {
            f"router.{kind}/layers.{i}.mlp.router": getattr(moe.router, kind)
            for i, moe in self.layers.items()
            for kind in ("bias", "load")
        }
