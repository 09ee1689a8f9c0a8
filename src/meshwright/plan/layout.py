"""How a model is split over ranks: one value per axis, and where each rank stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Precision = Literal["fp32", "bf16"]
Schedule = Literal["1f1b"]
Axis = Literal["dp_replicate", "dp_shard", "tp", "pp"]


class Layout(BaseModel):
    """One value per axis, ZeRO stage, micro-batch, schedule and precision. Missing axes are 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dp_replicate: int = Field(default=1, gt=0)
    dp_shard: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    sp: bool = Field(default=True, description="sequence parallelism inside the tp group")
    cp: Literal[1] = 1
    pp: int = Field(default=1, gt=0)
    vpp: Literal[1] = 1
    ep: Literal[1] = 1
    etp: Literal[1] = 1
    zero: Literal[0, 3] | None = Field(default=None, description="None: follows dp_shard")
    schedule: Schedule = "1f1b"
    micro_batch: int = Field(default=1, gt=0, description="sequences")
    recompute: Literal["none"] = "none"
    precision: Precision = "fp32"
    offload: Literal["none"] = "none"

    @model_validator(mode="before")
    @classmethod
    def _refuse_auto(cls, raw: object) -> object:
        if raw == "auto":
            raise ValueError(
                "needs the planner, which this version does not have; "
                "write a [layout] table: dp_replicate, dp_shard, tp, pp"
            )
        return raw

    @model_validator(mode="after")
    def _check_zero(self) -> Self:
        if self.zero is not None and self.zero != self.zero_stage:
            raise ValueError(
                f"zero = {self.zero} contradicts dp_shard = {self.dp_shard}: "
                "zero = 3 shards over dp_shard > 1; leave zero out to let it follow"
            )
        return self

    @property
    def zero_stage(self) -> int:
        """3 where weights, gradients and optimizer state are sharded, else 0."""
        return 3 if self.dp_shard > 1 else 0

    @property
    def dp(self) -> int:
        """Data-parallel ranks: replicate x shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between blocks are split along the sequence."""
        return self.sp and self.tp > 1

    @property
    def label(self) -> str:
        """`dp2xtp2xpp2`: the axes that are not 1; `one process` if none."""
        names = {"dp": self.dp_replicate, "fsdp": self.dp_shard, "tp": self.tp, "pp": self.pp}
        split = [f"{name}{size}" for name, size in names.items() if size > 1]
        return "x".join(split) or "one process"


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands on each axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int


# From the slowest-varying axis to the fastest: tp neighbours are adjacent chips, stages far apart.
AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "tp")


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Coordinates of `rank`; `tp` varies fastest, then `dp_shard`, `dp_replicate`, `pp`."""
    rank, tp = divmod(rank, layout.tp)
    rank, dp_shard = divmod(rank, layout.dp_shard)
    pp, dp_replicate = divmod(rank, layout.dp_replicate)
    return Coordinates(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)


def groups(layout: Layout, *axes: Axis) -> list[list[int]]:
    """Every group of ranks that differ only in `axes`; ranks ascend, groups by their first rank."""
    found: dict[tuple[int, ...], list[int]] = {}
    fixed = [axis for axis in AXES if axis not in axes]
    for rank in range(layout.world):
        where = coordinates(layout, rank)
        found.setdefault(tuple(getattr(where, axis) for axis in fixed), []).append(rank)
    return list(found.values())


def stage_layers(layers: int, stages: int) -> list[range]:
    """Layers of each pipeline stage, in order. A remainder goes to the stages in the middle,
    since the first also holds the embedding and the last the head."""
    base, extra = divmod(layers, stages)
    first_extra = (stages - extra) // 2
    ranges, start = [], 0
    for stage in range(stages):
        size = base + (first_extra <= stage < first_extra + extra)
        ranges.append(range(start, start + size))
        start += size
    return ranges
