"""Sets up the checks of `agreement.py` and `rechecking.py` on a member that takes part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NoReturn

from meshwright.base.events import Kind
from meshwright.train.agreement import Finding, Guard
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.group import FabricGroup
from meshwright.train.loop import TrainLoop
from meshwright.train.rechecking import recheck

_TWIN_CHANNEL, _RECHECK_CHANNEL = 6, 8  # see `member` for others


def stand_guard(
    loop: TrainLoop, fabric: Fabric, twins: Sequence[int], emit: Callable[..., object]
) -> Guard:
    """Have `loop` checked; `twins` are the other ranks that hold the same, `emit` says what is
    found. What is returned guards the trainer already."""
    ranks = tuple(sorted((fabric.rank, *twins)))

    def group(channel: int) -> FabricGroup | None:
        return FabricGroup(fabric, ranks, channel) if len(ranks) > 1 else None

    def tell(found: Finding) -> None:
        members = [fabric.table.members[rank] for rank in found.suspects]
        emit(Kind.CORRUPT, **asdict(found), members=members)

    def halt() -> NoReturn:
        fabric.operation().wait()  # what has not been begun is never done: until a table comes
        raise AssertionError("waited for nothing")

    sampled = group(_RECHECK_CHANNEL)

    def check(step: int) -> None:
        if (found := recheck(loop.trainer, sampled, step)) is not None:
            tell(found)

    loop.check = check
    loop.trainer.guard = guard = Guard(loop.trainer, group(_TWIN_CHANNEL), tell, halt)
    return guard
