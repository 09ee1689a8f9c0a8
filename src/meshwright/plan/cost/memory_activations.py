"""What waits for its backward on one pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.cost.candidates import ATTENTION, CORE, FULL, MLP, Candidates, Floats
from meshwright.plan.cost.memory_setting import Setting, lane_tokens, sequence_parts
from meshwright.plan.cost.memory_shape import MemoryLayer
from meshwright.plan.cost.memory_stage import Stage

LSE_BYTES = 4.0  # flash attention keeps one fp32 number for each head and token


@dataclass(frozen=True)
class LayerBytes:
    """One layer and one micro-batch on one rank: bytes of each part, and of the layer's input."""

    attention: Floats
    scores: Floats
    mlp: Floats
    latents: Floats
    experts: Floats
    entry: Floats

    @property
    def whole(self) -> Floats:
        """All that the layer leaves where nothing is recomputed."""
        return self.attention + self.scores + self.mlp + self.latents + self.experts


def layer_bytes(s: Setting, c: Candidates, kind: MemoryLayer) -> LayerBytes:
    """Bytes of one layer of `kind`."""
    tokens, parts = s.tokens(c), sequence_parts(c)
    gathered = s.element_bytes * s.shape.hidden * s.framework.gathered_kept * (c.tp > 1)
    mask = s.shape.hidden * s.shape.dropout / parts
    half = kind.outer_bytes / parts + mask + gathered
    heads = s.shape.heads / c.tp
    score = s.framework.scores_saved_bytes + 3.0 * s.shape.dropout
    routed = kind.input_bytes + kind.routed_bytes / c.etp
    return LayerBytes(
        attention=tokens * (half + kind.attention_bytes / c.tp + s.flash * LSE_BYTES * heads),
        scores=tokens * s.seq_len * heads * score * (not s.flash),
        mlp=tokens * (half + kind.mlp_bytes / c.tp),
        latents=tokens * kind.latent_bytes / parts,
        experts=lane_tokens(s, c) * routed * s.imbalance,
        entry=tokens * s.shape.hidden * s.element_bytes / parts,
    )


def activation_parts(s: Setting, c: Candidates, stage: Stage) -> dict[str, Floats]:
    """Bytes of all layers of the rank and all micro-batches in flight."""
    ahead = s.shape.predictions * stage.last
    counts = (
        (s.shape.dense, stage.dense * stage.copies),
        (s.shape.moe, stage.moe * stage.copies + ahead),
    )
    parts = {name: np.zeros(len(c)) for name in ("activations", "latents", "experts")}
    for kind, count in counts:
        for name, size in _kept(c, layer_bytes(s, c, kind)).items():
            parts[name] = parts[name] + count * size
    here = s.trained * np.where(c.offload_activations, _at_home(stage), 1.0)
    return {name: size * here for name, size in parts.items()}


def _kept(c: Candidates, layer: LayerBytes) -> dict[str, Floats]:
    """Bytes that a layer keeps for each part, after what recomputation drops."""
    attention = np.isin(c.recompute, (ATTENTION, FULL)) * c.recompute_share
    mlp = np.isin(c.recompute, (MLP, FULL)) * c.recompute_share
    core = np.isin(c.recompute, (CORE, ATTENTION, FULL)) * c.recompute_share
    inputs = layer.entry * np.where(c.recompute == FULL, attention, attention + mlp)
    plain = layer.attention * (1 - attention) + layer.scores * (1 - core) + layer.mlp * (1 - mlp)
    return {
        "activations": plain + inputs,
        "latents": layer.latents * (1 - attention),
        "experts": layer.experts * (1 - mlp),
    }


def _at_home(stage: Stage) -> Floats:
    """Share of activations on the chip when they are offloaded: those of two layers."""
    every = (stage.dense + stage.moe) * stage.copies
    return np.minimum(1.0, 2.0 / np.maximum(every, 1.0))
