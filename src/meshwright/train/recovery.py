"""How the members of a new table agree where they stand, and how those without state get it.

Every member says what it has (`Standing`); what follows from it is decided alike on all
(`settle`, pure): a step that anybody has voted on counts, and whoever has not applied it does;
everything else of the step under way is repeated.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.base.errors import RunError
from meshwright.train.fabric.group import FabricGroup, bytes_of, json_tensors
from meshwright.train.gradients import Vote
from meshwright.train.precision.scaling import LossScale
from meshwright.train.trainer import Trainer
from meshwright.train.witness import Seen

_RECORD_BYTES, _BYTES_A_RANK = 768, 8  # of a standing, which may list all ranks


@dataclass(frozen=True)
class Standing:
    """Where one member stands. Steps count from 0; `applied` is how many are in its weights.

    `agreed` is the last step it holds a vote of, `reduced` the step whose summed gradients are
    whole here. `fresh` members have no state at all. `evaluated` and `checked` are the last steps
    after which this has been done here (each rank saves by itself); `peak_flops` is 0 where it is
    not known. `keeps` are the ranks whose state is whole here too, as of the step that this rank
    has applied. `intact`: nothing that it shares with its replica has been cut short. What a member
    knows at `second_hand`, by having shadowed its rank, is only that state. `seen` is what it was
    told of another rank (`witness.py`).
    """

    rank: int
    fresh: bool
    applied: int = 0
    agreed: tuple[int, Vote] | None = None
    reduced: int | None = None
    evaluated: int = 0
    checked: int = 0
    peak_flops: float = 0.0
    keeps: tuple[int, ...] = ()
    intact: bool = False
    second_hand: bool = False
    seen: Seen | None = None

    def as_bytes(self) -> bytes:
        """JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Standing:
        """The inverse of `as_bytes`."""
        fields = json.loads(data)
        if fields["agreed"] is not None:
            step, vote = fields["agreed"]
            fields["agreed"] = (step, Vote(**vote))
        fields["keeps"] = tuple(fields["keeps"])
        fields["seen"] = fields["seen"] and tuple(fields["seen"])
        return cls(**fields)


@dataclass(frozen=True)
class Settled:
    """What all go on from: `steps` are in the weights of all, once the ranks `late` have applied
    the last of them; the ranks `fresh` have to be given their state. The ranks `going_on` keep what
    their replica has worked out of the step under way."""

    steps: int
    agreed: tuple[int, Vote] | None
    late: tuple[int, ...]
    fresh: tuple[int, ...]
    evaluated: int
    checked: int
    peak_flops: float
    going_on: frozenset[int] = frozenset()

    @property
    def from_nothing(self) -> bool:
        """Whether nobody has any state: a start."""
        return self.steps < 0


def settle(
    standings: Sequence[Standing],
    blocks: Sequence[frozenset[int]] = (),
    due: Callable[[int], bool] = lambda _: False,
) -> Settled:
    """What follows from where all ranks stand. Raises RunError if a rank has lost gradients that
    others have applied, or is two steps behind.

    `blocks` has the block of each rank (`plan.resilience.blocks`), `due` says whether something
    that all take part in follows on so many steps.
    """
    fresh = tuple(one.rank for one in standings if one.fresh)
    holders = [one for one in standings if not one.fresh]
    peak = max(one.peak_flops for one in standings)
    if not holders:
        return Settled(-1, None, (), fresh, 0, 0, peak)
    votes = [one.agreed for one in holders if one.agreed is not None]
    agreed = max(votes, key=lambda vote: vote[0], default=None)
    steps = max(one.applied for one in holders)
    if agreed is not None:
        steps = max(steps, agreed[0] + 1)
    late = [one for one in holders if one.applied < steps]
    for one in late:
        if one.applied != steps - 1 or one.reduced != steps - 1:
            raise RunError(
                f"rank {one.rank} stands at step {one.applied} without the gradients that others "
                f"have applied up to step {steps}; resume from the last checkpoint"
            )
    told = [one for one in holders if not one.second_hand] or holders
    evaluated, checked = min(one.evaluated for one in told), min(one.checked for one in told)
    return Settled(
        steps=steps,
        agreed=agreed,
        late=tuple(one.rank for one in late),
        fresh=fresh,
        evaluated=evaluated,
        checked=checked,
        peak_flops=peak,
        going_on=_going_on(standings, blocks, due(steps) and min(evaluated, checked) < steps),
    )


def _going_on(
    standings: Sequence[Standing], blocks: Sequence[frozenset[int]], redo: bool
) -> frozenset[int]:
    """The ranks of blocks in which nobody was lost and nothing was cut short; with `redo` all have
    to come back to what follows on the step before."""
    if redo:
        return frozenset()
    whole = (ranks for ranks in set(blocks) if all(standings[rank].intact for rank in ranks))
    return frozenset().union(*whole)


def meet(world: FabricGroup, mine: Standing) -> list[Standing]:
    """Every rank's standing, in rank order. Raises Interrupted if another table comes."""
    size = _RECORD_BYTES + _BYTES_A_RANK * len(world.ranks)
    sent = torch.zeros(1, size, dtype=torch.uint8)
    data = mine.as_bytes()
    bytes_of(sent)[: len(data)] = data
    everywhere = sent.new_empty(len(world.ranks), size)
    world.all_gather(everywhere, sent).wait()
    rows = bytes_of(everywhere)
    return [
        Standing.from_bytes(bytes(rows[i * size : (i + 1) * size]).rstrip(b"\0"))
        for i in range(len(world.ranks))
    ]


def state_tensors(trainer: Trainer) -> list[Tensor]:
    """Everything that a rank learns, in an order that all trainers of the rank share."""
    found = []
    for group, moments in zip(trainer.data.groups, trainer.optimizer.moments, strict=True):
        found += [group.master, *moments]
    return [*found, *trainer.routing.state().values()]


def state_words(trainer: Trainer) -> dict[str, Any]:
    """The rest of the state, as plain JSON."""
    return {
        "updates": trainer.optimizer.updates_done,
        "loss_scale": trainer.loss_scale.as_json(),
        "seeded": trainer.routing.seeded,
        "applied": trainer.applied,
        "bad_samples": trainer.bad_samples,
    }


def set_words(trainer: Trainer, words: dict[str, Any]) -> None:
    """The inverse of `state_words`."""
    trainer.optimizer.set_updates_done(words["updates"])
    trainer.loss_scale = LossScale.from_json(words["loss_scale"])
    trainer.routing.seeded = trainer.seeded_before = words["seeded"]
    trainer.applied = words["applied"]
    trainer.bad_samples = words["bad_samples"]


def copy_state(ours: Trainer, theirs: Trainer) -> None:
    """Make `ours` stand where `theirs` does, at the same place of a layout of another size."""
    for place, x in zip(state_tensors(ours), state_tensors(theirs), strict=True):
        place.copy_(x)
    set_words(ours, state_words(theirs))
    ours.agreed = theirs.agreed


@dataclass(frozen=True)
class Given:
    """A state to give away: `tensors` in the order of `state_tensors`. With `counts` the routers'
    are those before the last step, which is still to be learnt from these."""

    tensors: Sequence[Tensor]
    words: dict[str, Any]
    counts: Tensor | None = None


def digest(tensors: Sequence[Tensor], words: dict[str, Any]) -> int:
    """CRC-32 of a state: a takeover waits for it, and it is the fastest that is at hand."""
    total = zlib.crc32(json.dumps(words, sort_keys=True).encode())
    for tensor in tensors:
        total = zlib.crc32(bytes_of(tensor), total)
    return total


def give_state(world: FabricGroup, rank: int, given: Given, more: dict[str, Any]) -> None:
    """Send a state, and `more`, to `rank`, whose it is from now on."""
    letter: dict[str, Any] = {
        "words": given.words,
        "digest": digest(given.tensors, given.words),
        "more": more,
    }
    letter["counts"] = None if given.counts is None else list(given.counts.shape)
    tensors = [*json_tensors(letter), *given.tensors]
    tensors += [] if given.counts is None else [given.counts]
    for op in [world.send(x, rank) for x in tensors if x.numel()]:
        op.wait()


def take_state(trainer: Trainer, world: FabricGroup, rank: int) -> dict[str, Any]:
    """Receive a state from `rank` in place of this rank's own; what came with it.

    Raises RunError if what came is not what was sent.
    """
    size = torch.zeros(1, dtype=torch.int64)
    world.receive(size, rank).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    coming = [world.receive(data, rank)]
    tensors = state_tensors(trainer)
    coming += [world.receive(tensor, rank) for tensor in tensors if tensor.numel()]
    for op in coming:
        op.wait()
    letter = json.loads(bytes(bytes_of(data)))
    words = letter["words"]
    if digest(tensors, words) != letter["digest"]:
        raise RunError(f"the state that rank {rank} gave differs from its own; nothing goes on")
    if letter["counts"] is not None:
        counts = torch.empty(letter["counts"], dtype=torch.int64)
        world.receive(counts, rank).wait()
        trainer.routing.learn_from(counts)
    set_words(trainer, words)
    more: dict[str, Any] = letter["more"]
    return more
