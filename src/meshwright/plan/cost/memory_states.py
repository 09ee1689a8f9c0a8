"""Weights, gradients, master copies and optimizer state of one pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.cost.candidates import Candidates, Floats, Ints
from meshwright.plan.cost.memory_setting import Setting
from meshwright.plan.cost.memory_stage import Stage


@dataclass(frozen=True)
class Held:
    """Parameters of one rank before ZeRO shares them out: of layers outside experts, of experts, of
    the embedding and the head."""

    layers: Floats
    experts: Floats
    tables: Floats


@dataclass(frozen=True)
class _State:
    """Bytes of a parameter, and the ZeRO stage from which its shards share it."""

    bytes: float
    sharded_from: int


def held_params(s: Setting, c: Candidates, stage: Stage) -> Held:
    """What the rank keeps. A tied table stands at both ends where these are different ranks, and
    multi-token prediction looks tokens up at the last one too."""
    shape = s.shape
    dense, _ = s.layer_weights(c, moe=False)
    routed, experts = s.layer_weights(c, moe=True)
    ahead = shape.predictions * stage.last
    layers = stage.dense * dense + (stage.moe + ahead) * routed + stage.last * shape.norm
    layers = layers + ahead * 2 * shape.hidden**2 / c.tp
    both = stage.first & stage.last
    ends = 1.0 * stage.first + stage.last - (both & shape.tied)
    ends = ends + (shape.predictions > 0) * (stage.last & ~both)
    tables = ends * s.vocab(c) * shape.hidden + stage.first * shape.positions
    copies = stage.weight_copies
    return Held(layers * copies, (stage.moe + ahead) * experts * copies, tables)


def state_parts(s: Setting, c: Candidates, stage: Stage) -> dict[str, Floats]:
    """Bytes of all states; those of the tables at the ends are one part of their own."""
    held = held_params(s, c, stage)
    tables = np.zeros(len(c))
    parts: dict[str, Floats] = {}
    for name, state in _states(s).items():
        plain = _shards(c, state, c.shards)
        routed = _shards(c, state, expert_shards(c))
        parts[name] = state.bytes * (held.layers / plain + held.experts / routed)
        tables = tables + state.bytes * held.tables / plain
    off = c.offload_optimizer
    for name in ("master", "optimizer"):
        parts[name] = np.where(off, 0.0, parts[name])
    return {**parts, "embedding": np.where(off, _resident(s, c, held.tables), tables)}


def _resident(s: Setting, c: Candidates, tables: Floats) -> Floats:
    """Bytes of the tables that stay on the chip when the optimizer is elsewhere."""
    states = _states(s)
    kept = [states["weights"], states["gradients"]]
    return sum((x.bytes * tables / _shards(c, x, c.shards) for x in kept), np.zeros(len(c)))


def _states(s: Setting) -> dict[str, _State]:
    f = s.framework
    full = s.precision == "fp32"
    gradients = f.gradient_bytes + f.bf16_gradient_copy_bytes * (s.precision in ("bf16", "fp8"))
    low = f.fp8_cache_bytes * (s.precision in ("fp8", "fp4"))
    master, moments = 0.0 if full else f.master_bytes, s.optimizer_bytes * f.optimizer_scale
    return {
        "weights": _State(4.0 if full else f.weight_bytes + low, f.weights_sharded_from),
        "gradients": _State(s.trained * (4.0 if full else gradients), f.gradients_sharded_from),
        "master": _State(s.trained * master, f.optimizer_sharded_from),
        "optimizer": _State(s.trained * moments, f.optimizer_sharded_from),
    }


def expert_shards(c: Candidates) -> Ints:
    """Ranks that share out the state of one copy of an expert (`expert_grid` of plan/layout.py)."""
    lanes = c.dp_shard * c.cp * np.where(c.etp == c.tp, 1, c.tp)
    fits = (c.zero > 0) & (lanes % c.ep == 0)
    return np.where(fits, np.maximum(lanes // c.ep, 1), 1)


def _shards(c: Candidates, state: _State, shards: Ints) -> Ints:
    return np.where(c.zero >= state.sharded_from, shards, 1)
