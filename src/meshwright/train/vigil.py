"""Sets up the checks of `agreement.py` and `rechecking.py` on a member that takes part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from meshwright.base.events import Kind
from meshwright.train.agreement import Finding, Guard
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.group import FabricGroup
from meshwright.train.loop import TrainLoop
from meshwright.train.rechecking import recheck
from meshwright.train.witness import Witness

_TWIN_CHANNEL, _RECHECK_CHANNEL = 1 << 20, (1 << 20) + 2  # far from those of keepers


def stand_guard(
    loop: TrainLoop,
    fabric: Fabric,
    twins: Sequence[int],
    emit: Callable[..., object],
    witness: Witness,
) -> Guard:
    """Have `loop` checked; `twins` are the other ranks that hold the same, `emit` says what is
    found, `witness` what the state came to. What is returned guards the trainer already."""
    ranks = tuple(sorted((fabric.rank, *twins)))

    def group(channel: int) -> FabricGroup | None:
        return FabricGroup(fabric, ranks, channel) if len(ranks) > 1 else None

    def tell(found: Finding) -> None:
        members = [fabric.table.members[rank] for rank in found.suspects]
        emit(Kind.CORRUPT, **asdict(found), members=members)

    sampled = group(_RECHECK_CHANNEL)

    def check(step: int) -> None:
        if (found := recheck(loop.trainer, sampled, step)) is not None:
            tell(found)

    loop.check = check
    loop.trainer.guard = guard = Guard(
        loop.trainer, group(_TWIN_CHANNEL), tell, fabric.halt, witness.tell
    )
    return guard
