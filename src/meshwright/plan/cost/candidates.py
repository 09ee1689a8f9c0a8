"""Many layouts as columns of numbers, so that one numpy expression prices all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from meshwright.base.errors import ConfigError
from meshwright.plan.layout import V_SCHEDULES, Layout, Schedule

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

# Codes are positions in these tuples. The schedules that the trainer has come first; the others are
# known from published runs: zero-bubble H1 and H2 (arXiv 2401.10241), DualPipe (arXiv 2412.19437).
SCHEDULES: tuple[str, ...] = (*get_args(Schedule), "zb1p", "zb2p", "dualpipe")
GPIPE, ONE_F_ONE_B, INTERLEAVED, ZBV, DUALPIPEV, ZB1P, ZB2P, DUALPIPE = range(len(SCHEDULES))

# What runs again in the backward: nothing, scores and their mixing only (Megatron's "selective"),
# the attention half of a layer, its feed-forward half, or both.
RECOMPUTES = ("none", "core", "attention", "mlp", "full")
NONE, CORE, ATTENTION, MLP, FULL = range(len(RECOMPUTES))


@dataclass(frozen=True)
class Candidates:
    """Column i of every array is one layout; sizes are counts, `micro_batch` is in sequences.

    `zero` is 0 to 3 and resolved, `recompute_share` the share of layers that `recompute` holds for,
    `loss_chunk` in tokens (0: all logits at once), `vpp` the chunks of a rank under interleaved.
    """

    dp_replicate: Ints
    dp_shard: Ints
    tp: Ints
    sp: Bools
    cp: Ints
    ulysses: Bools
    pp: Ints
    vpp: Ints
    ep: Ints
    etp: Ints
    zero: Ints
    micro_batch: Ints
    schedule: Ints
    recompute: Ints
    recompute_share: Floats
    loss_chunk: Ints
    offload_optimizer: Bools
    offload_activations: Bools

    @classmethod
    def of(cls, count: int, **columns: Any) -> Self:
        """`count` candidates from the columns given, as arrays or as one value for all; axes that
        are left out are 1, everything else off; `zero` as `Layout` has it by default."""
        chosen = {**_DEFAULTS, **columns}
        if chosen["zero"] is None:
            chosen["zero"] = np.where(np.asarray(chosen["dp_shard"]) > 1, 3, 0)
        types = {field.name: _TYPES[str(field.type)] for field in fields(cls)}
        if unknown := chosen.keys() - types.keys():
            raise TypeError(f"no such columns: {', '.join(sorted(unknown))}")
        return cls(
            **{
                name: np.ascontiguousarray(np.broadcast_to(np.asarray(chosen[name], kind), count))
                for name, kind in types.items()
            }
        )

    @classmethod
    def from_layouts(cls, layouts: Sequence[Layout]) -> Self:
        """The same layouts, in the same order."""
        rows = [_row(layout) for layout in layouts]
        return cls.of(len(rows), **{name: [row[name] for row in rows] for name in _DEFAULTS})

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        """All candidates of `parts`, one part after the other."""
        every = list(parts)
        columns = {
            field.name: np.concatenate([getattr(part, field.name) for part in every])
            for field in fields(cls)
        }
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, which: Ints | Bools | Sequence[int]) -> Self:
        """Those that `which`, indices or a mask, selects."""
        index = np.asarray(which)
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @property
    def dp(self) -> Ints:
        """Data-parallel ranks: replicate x shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> Ints:
        """Ranks in all."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def chunks(self) -> Ints:
        """Pipeline stages on one rank."""
        return np.where(np.isin(self.schedule, _V_CODES), 2, self.vpp)

    @property
    def virtual_stages(self) -> Ints:
        """Pipeline stages in all."""
        return self.pp * self.chunks

    @property
    def sequence_parallel(self) -> Bools:
        """Whether activations between blocks are split along the sequence over tp."""
        return self.sp & (self.tp > 1)

    @property
    def shards(self) -> Ints:
        """Ranks that share out the state of a weight that is no expert's: dp_shard x cp, or 1."""
        return np.where(self.zero > 0, self.dp_shard * self.cp, 1)

    @property
    def expert_lanes(self) -> Ints:
        """Ranks of one stage that see different tokens of an MoE layer (`expert_lanes` of
        plan/layout.py, over all replicas)."""
        return self.dp * self.cp * np.where(self.etp == self.tp, 1, self.tp)

    @property
    def expert_copies(self) -> Ints:
        """Ranks that hold the same expert slice: its gradient is summed over them."""
        return np.asarray(np.maximum(self.expert_lanes // self.ep, 1))

    def micro_batches(self, global_batch: int) -> Floats:
        """Micro-batches of a step on one rank; below 1 or broken where the batch does not fit."""
        return global_batch / (self.dp * self.micro_batch)

    def layout(self, index: int) -> Layout:
        """Candidate number `index` as a `Layout`. Raises ConfigError for a schedule that only
        other frameworks have."""
        row = {field.name: getattr(self, field.name)[index].item() for field in fields(self)}
        name = SCHEDULES[row["schedule"]]
        if name not in get_args(Schedule):
            raise ConfigError("layout.schedule", name, "only other frameworks have it")
        keep = ("dp_replicate", "dp_shard", "tp", "sp", "cp", "pp", "vpp", "ep", "etp")
        parts = {ATTENTION: ["attention"], CORE: ["attention"], MLP: ["mlp"]}
        selective = parts.get(row["recompute"])
        return Layout.model_validate(
            {
                **{key: row[key] for key in (*keep, "micro_batch", "loss_chunk")},
                "zero": row["zero"] if row["dp_shard"] * row["cp"] > 1 else 0,
                "cp_method": "ulysses" if row["ulysses"] else "ring",
                "schedule": name,
                "recompute": "selective" if selective else RECOMPUTES[row["recompute"]],
                "recompute_parts": selective or ["attention"],
                "offload": _OFFLOADS[row["offload_optimizer"], row["offload_activations"]],
            }
        )


_TYPES: dict[str, type] = {"Ints": np.int64, "Bools": np.bool_, "Floats": np.float64}
_V_CODES = [SCHEDULES.index(name) for name in V_SCHEDULES]
_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch")
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(_AXES, 1),
    **dict.fromkeys(("ulysses", "offload_optimizer", "offload_activations"), False),
    "sp": True,
    "zero": None,
    "schedule": ONE_F_ONE_B,
    "recompute": NONE,
    "recompute_share": 1.0,
    "loss_chunk": 0,
}
_OFFLOADS = {
    (False, False): "none",
    (True, False): "optimizer",
    (False, True): "activations",
    (True, True): "both",
}


def _row(layout: Layout) -> dict[str, Any]:
    """The columns of one layout. A budget for activations is priced as no recomputation."""
    same = ("sp", "loss_chunk", *_AXES)
    return {
        **{name: getattr(layout, name) for name in same},
        "ulysses": layout.cp_method == "ulysses",
        "zero": layout.zero_stage,
        "schedule": SCHEDULES.index(layout.schedule),
        "recompute": _recompute_code(layout),
        "recompute_share": 1.0,
        "offload_optimizer": layout.offload in ("optimizer", "both"),
        "offload_activations": layout.offload in ("activations", "both"),
    }


def _recompute_code(layout: Layout) -> int:
    if layout.recompute != "selective":
        return FULL if layout.recompute == "full" else NONE
    if set(layout.recompute_parts) == {"attention", "mlp"}:
        return FULL
    return ATTENTION if "attention" in layout.recompute_parts else MLP
