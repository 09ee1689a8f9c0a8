"""What pipeline stages send each other, in which order. Pure: it follows from the schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.plan.layout import Schedule
from meshwright.plan.schedule import Action, rank_of


@dataclass(frozen=True)
class Message:
    """The input of the forward or the backward of one micro-batch on `stage`."""

    kind: Literal["activation", "gradient"]
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Wiring:
    """Which rank of the pipeline runs which of `stages` stages."""

    schedule: Schedule
    pp: int
    stages: int

    def rank_of(self, stage: int) -> int:
        """Place in the pipeline of the rank that runs `stage`."""
        return rank_of(stage, self.schedule, self.pp)

    def sender_of(self, message: Message) -> int:
        """Place in the pipeline of the rank that sends `message`."""
        return self.rank_of(message.stage + (1 if message.kind == "gradient" else -1))

    def needs(self, action: Action) -> Message | None:
        """What `action` waits for from another stage; None at the ends of the pipeline."""
        if action.kind == "forward":
            first = action.stage == 0
            return None if first else Message("activation", action.stage, action.micro_batch)
        last = action.stage == self.stages - 1
        if action.kind == "backward_weight" or last:
            return None
        return Message("gradient", action.stage, action.micro_batch)

    def gives(self, action: Action) -> Message | None:
        """What `action` makes for another stage."""
        if action.kind == "forward":
            last = action.stage == self.stages - 1
            return None if last else Message("activation", action.stage + 1, action.micro_batch)
        if action.kind == "backward_weight" or action.stage == 0:
            return None
        return Message("gradient", action.stage - 1, action.micro_batch)

    def sent(self, order: Sequence[Action], rank: int, to: int) -> Iterator[Message]:
        """The messages that `rank`, which executes `order`, sends `to` another, as they go out."""
        return (message for message, _ in self.replies(order, rank, to))

    def replies(
        self, order: Sequence[Action], rank: int, to: int
    ) -> Iterator[tuple[Message, list[Message]]]:
        """The messages of `sent`, each with those from `to` that `rank` has taken before it sends
        it, and after it sent the one before."""
        if rank == to:
            return
        taken: list[Message] = []
        for action in order:
            needed, message = self.needs(action), self.gives(action)
            if needed is not None and self.sender_of(needed) == to:
                taken.append(needed)
            if message is not None and self.rank_of(message.stage) == to:
                yield message, taken
                taken = []
