"""Memory of a chip by part, for many candidate layouts at once.

Parts up to `floor` are tensors: their sum is what a framework calls allocated. `slack` is what its
allocator holds besides (reserved), `context` and `communicators` lie outside the allocator. All are
bytes on the heaviest pipeline rank of a candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.cost import memory_buffers as buffers
from meshwright.plan.cost.candidates import Candidates, Floats, Ints
from meshwright.plan.cost.memory_activations import activation_parts
from meshwright.plan.cost.memory_setting import Setting, setting_of
from meshwright.plan.cost.memory_stage import Stage, in_flight, stage_of
from meshwright.plan.cost.memory_states import state_parts
from meshwright.plan.cost.workload import Workload
from meshwright.plan.layout import Layout
from meshwright.plan.schedule import stages_of
from meshwright.plan.stages import stage_layers

STATES = ("weights", "gradients", "master", "optimizer", "embedding")
TENSORS = (
    *STATES, "activations", "latents", "experts", "logits", "workspace", "wgrads", "whole",
    "buffers", "floor",
)  # fmt: skip
OUTSIDE = ("slack", "context", "communicators")
PARTS = (*TENSORS, *OUTSIDE)


@dataclass(frozen=True)
class Memory:
    """Bytes by part of the heaviest pipeline rank of each candidate, and which rank that is."""

    parts: dict[str, Floats]
    rank: Ints

    @property
    def allocated_bytes(self) -> Floats:
        """What tensors take: `max_memory_allocated` of PyTorch."""
        return add(self.parts, TENSORS)

    @property
    def reserved_bytes(self) -> Floats:
        """What the allocator takes from the chip."""
        return self.allocated_bytes + self.parts["slack"]

    @property
    def total_bytes(self) -> Floats:
        """What the chip must have."""
        return add(self.parts, PARTS)


def add(parts: dict[str, Floats], names: tuple[str, ...]) -> Floats:
    """The sum of some parts."""
    return sum((parts[name] for name in names), np.zeros_like(parts[names[0]]))


def memory(work: Workload, c: Candidates) -> Memory:
    """Memory of the heaviest pipeline rank of every candidate."""
    return heaviest(setting_of(work), c)


def memory_parts(work: Workload, c: Candidates) -> dict[str, Floats]:
    """Bytes by part of the heaviest pipeline rank of every candidate."""
    return memory(work, c).parts


def heaviest(s: Setting, c: Candidates) -> Memory:
    """The heaviest of the first rank (embedding, most in flight), the second (no layer without
    experts) and the last (head and logits): between the second and the last nothing is more."""
    ranks = [np.minimum(rank, c.pp - 1) for rank in (0, 1)] if np.any(c.pp > 1) else [c.pp - 1]
    ranks = [*ranks, c.pp - 1] if np.any(c.pp > 2) else ranks
    found = [rank_memory(s, c, rank) for rank in ranks]
    which = np.argmax([one.total_bytes for one in found], axis=0)
    parts = {name: np.choose(which, [one.parts[name] for one in found]) for name in found[0].parts}
    return Memory(parts, np.choose(which, ranks))


def rank_memory(s: Setting, c: Candidates, rank: Ints) -> Memory:
    """Memory of pipeline rank `rank` of each candidate."""
    stage = stage_of(s.shape, c, rank, s.micro_batches(c), s.framework.even_stages)
    return Memory(stage_parts(s, c, stage), rank)


def stage_parts(s: Setting, c: Candidates, stage: Stage) -> dict[str, Floats]:
    """Bytes by part of `stage`. Logits and the backward of a layer do not meet, so the workspace is
    what it needs beyond the logits."""
    f = s.framework
    logits = buffers.logit_bytes(s, c, stage)
    parts = {
        **state_parts(s, c, stage),
        **activation_parts(s, c, stage),
        "logits": logits,
        "workspace": np.maximum(buffers.workspace_bytes(s, c, stage) - logits, 0.0),
        "wgrads": buffers.wgrad_bytes(s, c, stage),
        "whole": buffers.whole_bytes(s, c, stage),
        "buffers": buffers.buffer_bytes(s, c, stage),
        "floor": np.full(len(c), f.floor_bytes),
    }
    parts["slack"] = f.slack * add(parts, TENSORS)
    parts["context"] = np.full(len(c), f.context_bytes)
    parts["communicators"] = f.communicator_bytes * buffers.communicators(c)
    return parts


def rank_parts(work: Workload, layout: Layout) -> list[dict[str, float]]:
    """Bytes by part of every pipeline rank of one layout, with the layers that `plan/stages.py`
    gives it. A rank's layers count as evenly spread over its chunks."""
    s, c = setting_of(work), Candidates.from_layouts([layout])
    ranges = stage_layers(work.spec, layout, work.seq_len)
    found = []
    for rank in range(layout.pp):
        stages = stages_of(rank, layout.schedule, layout.pp, layout.chunks)
        layers = [layer for stage in stages for layer in ranges[stage]]
        flying = in_flight(c, np.array([rank]), s.micro_batches(c))
        moe = sum(work.spec.is_moe(layer) for layer in layers)
        stage = Stage(
            dense=np.array([float(len(layers) - moe)]),
            moe=np.array([float(moe)]),
            copies=flying / c.chunks,
            first=np.array([0 in stages]),
            last=np.array([layout.virtual_stages - 1 in stages]),
            weight_copies=np.ones(1),
        )
        parts = stage_parts(s, c, stage)
        found.append({name: float(size[0]) for name, size in parts.items()})
    return found
