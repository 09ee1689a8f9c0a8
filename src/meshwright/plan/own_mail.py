"""Messages between the stages of a pipeline in bytes (`train/parallel/mail.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.plan.own_rank import Rank
from meshwright.plan.own_tape import Block
from meshwright.plan.schedule import Action, rank_of


class Message(NamedTuple):
    """The input of the forward (an activation) or backward (a gradient) of a micro-batch."""

    kind: str
    stage: int
    micro_batch: int


class Mail:
    """What `rank` has received and sent in a step, each message of `n_bytes`."""

    def __init__(self, rank: Rank, n_bytes: int) -> None:
        self.rank, self.n_bytes = rank, n_bytes
        self.last = rank.layout.virtual_stages - 1
        self._here: dict[Message, Block] = {}
        self._due: dict[int, deque[Message]] = {}
        self._sent: dict[int, deque[Block]] = {}

    def at(self, stage: int) -> int:
        """Place in the pipeline of the rank that runs `stage`."""
        return rank_of(stage, self.rank.layout.schedule, self.rank.layout.pp)

    def needs(self, action: Action) -> Message | None:
        """What `action` waits for from another stage."""
        stage = action.stage
        if action.kind == "forward":
            return Message("activation", stage, action.micro_batch) if stage else None
        if action.kind == "backward_weight" or stage == self.last:
            return None
        return Message("gradient", stage, action.micro_batch)

    def gives(self, action: Action) -> Message | None:
        """What `action` makes for another stage."""
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind == "forward":
            return None if stage == self.last else Message("activation", stage + 1, micro_batch)
        if action.kind == "backward_weight" or stage == 0:
            return None
        return Message("gradient", stage - 1, micro_batch)

    def expect(self, orders: Sequence[Sequence[Action]]) -> None:
        """Learn what will come from whom, and in which order."""
        me = self.rank.at.pp
        for peer, order in enumerate(orders):
            given = (self.gives(action) for action in order)
            mine = (m for m in given if m is not None and peer != me and self.at(m.stage) == me)
            self._due[peer] = deque(mine)

    def post(self, message: Message | None) -> None:
        """Make room for `message` and for all that comes before it."""
        if message is None:
            return
        rank = self.rank
        peer = self.at(message.stage + (1 if message.kind == "gradient" else -1))
        due = self._due[peer]
        while peer != rank.at.pp and message not in self._here and message in due:
            block = rank.new(self.n_bytes)
            axis = "down" if peer < rank.at.pp else "up"
            rank.say(axis, "receive", self.n_bytes, block, size=rank.layout.pp)
            self._here[due.popleft()] = block

    def take(self, message: Message) -> Block:
        """`message`, which has come."""
        self.post(message)
        return self._here.pop(message)

    def give(self, message: Message, block: Block) -> None:
        """Send it; so many sends to a rank stay in memory until later ones follow."""
        rank, peer = self.rank, self.at(message.stage)
        if peer == rank.at.pp:
            self._here[message] = block
            return
        sent = self._sent.setdefault(peer, deque())
        if len(sent) >= 2 * rank.layout.virtual_stages + 2:
            sent.popleft()
        axis = "down" if rank.at.pp < peer else "up"
        rank.say(axis, "send", self.n_bytes, block, size=rank.layout.pp)
        sent.append(block)

    def finish(self) -> None:
        """Everything has been received."""
        self._sent.clear()
