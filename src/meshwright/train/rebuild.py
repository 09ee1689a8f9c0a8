"""How a rank that is lost is made again from a parity and the other ranks of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from meshwright.plan.resilience import Keeping
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.line import Line
from meshwright.train.loop import TrainLoop
from meshwright.train.parity import Parity, Sum, add
from meshwright.train.recovery import set_words, state_words
from meshwright.train.trainer import Trainer

_CHANNEL = 12


def help_rebuild(
    fabric: Fabric, keeping: Keeping, lost: int, parity: Parity, loop: TrainLoop
) -> None:
    """The part of a rank that is of the group of `lost`, or keeps its parity: what it has as of
    when that parity was last whole."""
    group, keeper, me = keeping.group_of(lost), keeping.keepers[lost], fabric.rank
    others = [rank for rank in group if rank != lost]
    to_lost = Line(fabric, lost, _CHANNEL + 2 * lost)
    if me == keeper:
        kept = parity.sums[group]
        at = {"applied": kept.applied, "done": kept.done}
        for rank in others:
            Line(fabric, rank, _CHANNEL + 2 * lost).say(at).wait()
        to_lost.say(at).wait()
        for index in range(len(kept.sizes[lost])):
            to_lost.send(_cut([*kept.state[index], *kept.grads[index]], kept, lost, index)).wait()
    elif me in others:
        told: dict[str, Any] = {}
        Line(fabric, keeper, _CHANNEL + 2 * lost).hear(told.update).wait()
        trainer = loop.trainer
        sizes = [part.master.numel() for part in trainer.data.groups]
        words = state_words(trainer)
        said = {"words": words, "last": parity.last, "said": loop.said, "sizes": sizes}
        to_lost.say(said).wait()
        for index in range(len(sizes)):
            to_lost.send(parity.as_of(told["applied"], told["done"], index)).wait()
        to_lost.send(list(trainer.routing.state().values())).wait()


def rebuild(
    fabric: Fabric, keeping: Keeping, parity: Parity, loop: TrainLoop
) -> list[dict[str, object]]:
    """Make the state of this rank, which is lost, again; what the others have said since the last
    checkpoint."""
    trainer, rank = loop.trainer, fabric.rank
    channel = _CHANNEL + 2 * rank
    at: dict[str, Any] = {}
    keeper = Line(fabric, keeping.keepers[rank], channel)
    keeper.hear(at.update).wait()
    pieces = [_pieces(trainer, index) for index in range(len(trainer.data.groups))]
    for mine in pieces:
        keeper.receive(mine).wait()
    told: dict[str, Any] = {}
    for other in [one for one in keeping.group_of(rank) if one != rank]:
        line = Line(fabric, other, channel)
        line.hear(told.update).wait()
        for index, size in enumerate(told["sizes"]):
            mine = pieces[index] if index < len(pieces) else []
            theirs = [x.new_empty(size) for x in pieces[0]]
            line.receive(theirs).wait()
            add(mine, theirs)
        line.receive(list(trainer.routing.state().values())).wait()
    _finish(trainer, parity, at, told)
    said: list[dict[str, object]] = told["said"]
    return said


def _finish(trainer: Trainer, parity: Parity, at: dict[str, Any], told: dict[str, Any]) -> None:
    """Update what the parity did not have the update of."""
    words, last = told["words"], told["last"]
    parity.last = last
    set_words(trainer, words)
    if words["applied"] > at["applied"] and last["rate"] is not None:
        trainer.optimizer.set_updates_done(words["updates"] - 1)
        for index in range(at["done"], len(trainer.data.groups)):
            parity.update(index, last["rate"], last["divisor"])
        trainer.optimizer.set_updates_done(words["updates"])


def _pieces(trainer: Trainer, index: int) -> list[Tensor]:
    group = trainer.data.groups[index]
    return [group.master, *trainer.optimizer.moments[index], group.grad]


def _cut(pieces: Sequence[Tensor], kept: Sum, rank: int, index: int) -> list[Tensor]:
    """What concerns `rank` of the sums of a flat group."""
    widths = [4, 4, 4, kept.grad_bytes]
    size = kept.size(rank, index)
    return [x[: size * width] for x, width in zip(pieces, widths, strict=True)]
