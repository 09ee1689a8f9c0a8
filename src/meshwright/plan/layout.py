"""How a model is split over ranks: one value per axis, and where each rank stands."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"]
Axis = Literal["dp_replicate", "dp_shard", "cp", "tp", "pp"]
ExpertAxis = Literal["replicas", "shards", "ep"]
V_SCHEDULES = ("zbv", "dualpipev")  # two chunks a rank, the second on the way back


class Layout(BaseModel):
    """One value per axis, ZeRO stage, micro-batch, schedule and precision. Missing axes are 1.

    `ep` and `etp` do not multiply the ranks: inside a pipeline stage the ranks of the data, context
    and (unless etp = tp) tensor axes share the experts out, `ep` of them to one copy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    dp_replicate: int = Field(default=1, gt=0)
    dp_shard: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    sp: bool = Field(default=True, description="sequence parallelism inside the tp group")
    cp: int = Field(default=1, gt=0)
    cp_method: Literal["ring", "ulysses"] = "ring"
    pp: int = Field(default=1, gt=0)
    vpp: int = Field(default=1, gt=0, description="chunks of a rank under interleaved")
    ep: int = Field(default=1, gt=0)
    etp: int = Field(default=1, gt=0, description="1 or tp")
    zero: Literal[0, 1, 2, 3] | None = Field(default=None, description="None: follows dp_shard")
    domain: int = Field(default=0, ge=0, description="replicas of a scale-up domain; 0: no levels")
    schedule: Schedule = "1f1b"
    stages: list[int] = Field(default=[], description="layers of each stage; empty: by cost")
    micro_batch: int = Field(default=1, gt=0, description="sequences")
    recompute: Literal["none", "selective", "full", "budget"] = "none"
    recompute_parts: list[Literal["attention", "mlp"]] = ["attention"]
    activation_gib: float = Field(default=0.0, ge=0, description="of a rank, for budget")
    precision: Precision = "fp32"
    fp8_scaling: Literal["tensor", "row", "block"] = "row"
    grad_precision: Literal["fp32", "bf16"] = "fp32"
    grad_compression: Literal["none", "bf16", "fp8", "int8"] = "none"
    loss_chunk: int = Field(default=0, ge=0, description="tokens of a slice of logits; 0: all")
    offload: Literal["none", "optimizer", "activations", "both"] = "none"
    expert_replicas: int = Field(default=0, ge=0, description="extra places for hot experts")
    rebalance_above: float = Field(default=0.0, ge=0, description="max / mean load; 0: never")
    compile: bool = Field(default=True, description="compile layers on GPUs; CPUs never do")

    @model_validator(mode="after")
    def _check_zero(self) -> Self:
        if self.zero == 0 and self.dp_shard > 1:
            raise ValueError(
                f"zero = 0 contradicts dp_shard = {self.dp_shard}: nothing would be sharded; "
                "use dp_replicate, or set zero to 1, 2 or 3"
            )
        if self.zero and self.dp_shard * self.cp == 1:
            raise ValueError(
                f"zero = {self.zero} contradicts dp_shard = {self.dp_shard}: "
                "there is nothing to shard over; set dp_shard > 1 or leave zero out"
            )
        return self

    @property
    def zero_stage(self) -> int:
        """What is sharded over dp_shard x cp: 1 the optimizer state, 2 gradients too, 3 weights
        too; by default 3 where dp_shard > 1, else 0."""
        return (3 if self.dp_shard > 1 else 0) if self.zero is None else self.zero

    @property
    def dp(self) -> int:
        """Data-parallel ranks: replicate x shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def chunks(self) -> int:
        """Pipeline stages on one rank."""
        return 2 if self.schedule in V_SCHEDULES else self.vpp

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule makes weight gradients apart from the input's."""
        return self.schedule in V_SCHEDULES

    @property
    def virtual_stages(self) -> int:
        """Pipeline stages in all."""
        return self.pp * self.chunks

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between blocks are split along the sequence."""
        return self.sp and self.tp > 1

    @property
    def sequence_split(self) -> int:
        """Equal parts that a sequence must divide into: a ring gives each rank an early and a late
        part, and sequence parallelism cuts what a rank has once more."""
        ring = 2 if self.cp > 1 and self.cp_method == "ring" else 1
        return self.cp * lcm(ring, self.tp if self.sequence_parallel else 1)

    @property
    def label(self) -> str:
        """`dp2xtp2xpp2`: the axes that are not 1; `one process` if none."""
        sizes = {
            "dp": self.dp_replicate,
            ("fsdp" if self.zero_stage == 3 else "shard"): self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
            "pp": self.pp,
            "ep": self.ep,
        }
        split = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        return "x".join(split) or "one process"


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands on each axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


# From the slowest-varying axis to the fastest: tp neighbours are adjacent chips, stages far apart.
AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Coordinates of `rank`; `tp` varies fastest, then `cp`, `dp_shard`, `dp_replicate`, `pp`."""
    rank, tp = divmod(rank, layout.tp)
    rank, cp = divmod(rank, layout.cp)
    rank, dp_shard = divmod(rank, layout.dp_shard)
    pp, dp_replicate = divmod(rank, layout.dp_replicate)
    return Coordinates(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)


def groups(layout: Layout, *axes: Axis) -> list[list[int]]:
    """Every group of ranks that differ only in `axes`; ranks ascend, groups by their first rank."""
    found: dict[tuple[int, ...], list[int]] = {}
    fixed = [axis for axis in AXES if axis not in axes]
    for rank in range(layout.world):
        where = coordinates(layout, rank)
        found.setdefault(tuple(getattr(where, axis) for axis in fixed), []).append(rank)
    return list(found.values())


@dataclass(frozen=True)
class ExpertGrid:
    """How the ranks of one pipeline stage share experts: copies = replicas x shards of them."""

    replicas: int
    shards: int
    ep: int


def expert_lanes(layout: Layout) -> int:
    """Ranks of one replica of a stage that see different tokens of an MoE layer."""
    return layout.dp_shard * layout.cp * (1 if layout.etp == layout.tp else layout.tp)


def expert_grid(layout: Layout) -> ExpertGrid:
    """Copies of the experts: over replicas as the other weights, and over what `ep` leaves of
    dp_shard x cp (x tp unless etp = tp)."""
    lanes = expert_lanes(layout)
    if lanes % layout.ep == 0:
        copies, shards = layout.dp_replicate, lanes // layout.ep
    else:
        copies, shards = layout.dp_replicate * lanes // layout.ep, 1
    if layout.zero_stage == 0:
        copies, shards = copies * shards, 1
    return ExpertGrid(copies, shards, layout.ep)


def expert_groups(layout: Layout, axis: ExpertAxis) -> list[list[int]]:
    """Groups of ranks that differ only in `axis` of the expert grid (and hold the same stage and,
    where etp = tp, the same slice)."""
    grid, lanes_tp = expert_grid(layout), 1 if layout.etp == layout.tp else layout.tp
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world):
        where = coordinates(layout, rank)
        lane = (where.dp_replicate * layout.dp_shard + where.dp_shard) * layout.cp + where.cp
        lane = lane * lanes_tp + (where.tp if lanes_tp > 1 else 0)
        slice_index = 0 if lanes_tp > 1 else where.tp
        rest, ep = divmod(lane, grid.ep)
        replicas, shards = divmod(rest, grid.shards)
        place = {"replicas": replicas, "shards": shards, "ep": ep}
        place.pop(axis)
        found.setdefault((where.pp, slice_index, *place.values()), []).append(rank)
    return list(found.values())


def domain_groups(layout: Layout, level: Literal["inside", "across"]) -> list[list[int]]:
    """The replicas of the weights cut in two levels: runs of `domain` of them, and the ranks at the
    same place of each run. Without a domain nobody is inside with another."""
    axes: tuple[Axis, ...] = ("dp_replicate",) if layout.zero_stage else ("dp_replicate", "cp")
    found: list[list[int]] = []
    for ranks in groups(layout, *axes):
        size = layout.domain or 1
        runs = [ranks[start : start + size] for start in range(0, len(ranks), size)]
        found += runs if level == "inside" else [list(column) for column in zip(*runs, strict=True)]
    return found
