"""Who keeps the state of a rank at the table at hand, as objects of its trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from meshwright.plan.resilience import Keeping
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.group import FabricGroup, json_tensors, receive_json
from meshwright.train.loop import TrainLoop
from meshwright.train.parity import Parity
from meshwright.train.recovery import Standing
from meshwright.train.redundancy import Cost, Kept, Mirror
from meshwright.train.shadow import Shadow, Shadowed
from meshwright.train.trainer import Redundancy, Trainer

_MIRROR_CHANNEL = 4  # what groups take for themselves are hashes


class Keeper(Redundancy, Protocol):
    """What a rank does for others, and for itself with who keeps its state."""

    @property
    def kept(self) -> dict[int, Kept]:
        """The states of others that are whole here."""

    @property
    def wards(self) -> tuple[int, ...]:
        """The ranks whose state can be had from here."""

    def exchange(self, pairs: list[tuple[int, int]], rank: int) -> None:
        """After a new table: have all be kept again; `pairs` of (ward, keeper) lack it."""

    def take_cost(self) -> Cost:
        """What it has taken since it was last asked."""


def arm(
    trainer: Trainer,
    keeping: Keeping,
    fabric: Fabric,
    before: Keeper | None,
    differs: Callable[[int], object],
) -> Keeper | None:
    """Have the state of `trainer`, of the rank that `fabric` has, kept as `keeping` says from now
    on; `before` did so until the table at hand."""
    if trainer.mesh.layout.world != len(fabric.table.members):
        before = None  # ranks of another size are other ranks
    rank, kept = fabric.rank, {} if before is None else before.kept
    keeper: Keeper | None = None
    if keeping.kind == "shadow":
        table = fabric.table
        place = table.place_of(table.shadows[rank])
        assert place is not None
        keeper = Shadowed(trainer, fabric, place, kept, differs, before)
    elif keeping.kind == "parity":
        keeper = Parity(trainer, fabric, keeping, before)
    elif keeping.kind == "mirror":
        everyone = FabricGroup(fabric, tuple(range(len(fabric.table.members))), _MIRROR_CHANNEL)
        wards = keeping.wards(rank)
        keeper = Mirror(trainer, everyone, keeping.keepers[rank], wards, kept)
    trainer.redundancy = keeper
    return keeper


def take_over(shadow: Shadow, rank: int, loop: TrainLoop) -> dict[int, Kept]:
    """Have `loop`, which is new, stand where the lost `rank` stood, by what `shadow` holds of it;
    what it holds of others that are as far."""
    held, others = shadow.promote(rank)
    held.fill(loop.trainer)
    step = loop.trainer.applied
    done = loop.progress
    done.step, loop.noted = step, step
    done.evaluated = done.saved = done.checked = max(step - 1, 0)
    return others


def share_said(world: FabricGroup, standings: Sequence[Standing], loop: TrainLoop) -> None:
    """Whoever shadowed its rank learns what the others have said since the last checkpoint."""
    holders = [one.rank for one in standings if not one.fresh and not one.second_hand]
    late = [one.rank for one in standings if one.second_hand]
    if not holders or not late:
        return
    me = loop.mesh.rank
    if me == holders[0]:
        peak = loop.inputs.peak_flops
        told: dict[str, Any] = {"said": loop.said, "noted": loop.noted, "peak_flops": peak}
        for rank in late:
            for op in [world.send(x, rank) for x in json_tensors(told)]:
                op.wait()
    elif me in late:
        told = receive_json(world, holders[0])
        loop.said, loop.noted = told["said"], told["noted"]
        loop.inputs = replace(loop.inputs, peak_flops=told["peak_flops"])
        loop.say_again()


def takes_from(keeping: Keeping, rank: int, source: int) -> bool:
    """Whether `rank` has its state from `source` as a whole, and not by parity."""
    return keeping.kind != "parity" or source in keeping.twins[rank]
