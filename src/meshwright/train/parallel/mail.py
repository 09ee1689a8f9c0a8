"""Tensors on their way between the stages of a pipeline.

Receives are posted in the order in which the sender sends, which follows from its schedule, so that
they match on every kind of network. Both sides go on meanwhile.

What has been sent is let go when a message shows that its receiver had it by then, which follows
from the schedule too. To ask the network would not do: gloo knows of a send only when it is waited
for, and with NCCL the process is far ahead of the chip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.plan.schedule import Action
from meshwright.train.comm import Axis, Pending
from meshwright.train.mesh import Mesh
from meshwright.train.parallel.messages import Message, Wiring


@dataclass
class _Transfer:
    """A tensor on its way; it must live until the transfer is done."""

    buffer: Tensor
    pending: Pending


@dataclass
class Mail:
    """The sends and receives of one pass through a schedule, on one rank.

    `like` gives shape, type and device of what travels. At most `window` sends to a rank are under
    way or not known to be done; a receiver is never further behind than the micro-batches in
    flight.
    """

    mesh: Mesh
    wiring: Wiring
    like: Tensor
    window: int
    _due: dict[int, deque[Message]] = field(default_factory=dict)
    _posted: dict[Message, _Transfer] = field(default_factory=dict)
    _sent: dict[int, dict[Message, _Transfer]] = field(default_factory=dict)
    _shown: dict[Message, list[Message]] = field(default_factory=dict)
    _local: dict[Message, Tensor] = field(default_factory=dict)

    def expect(self, orders: Sequence[Sequence[Action]]) -> None:
        """Learn from every rank's order what will come from whom."""
        me = self.mesh.at.pp
        for peer, order in enumerate(orders):
            replies = dict(self.wiring.replies(order, peer, me))
            self._due[peer] = deque(replies)
            self._shown |= replies

    def post(self, message: Message) -> None:
        """Be ready to receive `message`, and with it all that its sender sends before it."""
        peer = self.wiring.sender_of(message)
        while (
            peer != self.mesh.at.pp and message not in self._posted and message in self._due[peer]
        ):
            buffer = torch.empty_like(self.like)
            pending = self._axis(peer, self.mesh.at.pp).receive(buffer, peer)
            self._posted[self._due[peer].popleft()] = _Transfer(buffer, pending)

    def take(self, message: Message) -> Tensor:
        """`message`, once it has come."""
        if message in self._local:
            return self._local.pop(message)
        self.post(message)
        transfer = self._posted.pop(message)
        transfer.pending.wait()
        sent = self._sent.get(self.wiring.sender_of(message), {})
        for done in self._shown.pop(message):
            _let_go(sent, done)
        return transfer.buffer

    def give(self, message: Message, x: Tensor) -> None:
        """Send `x` on its way to the stage of `message`."""
        peer, x = self.wiring.rank_of(message.stage), x.contiguous()
        if peer == self.mesh.at.pp:
            self._local[message] = x
            return
        sent = self._sent.setdefault(peer, {})
        if len(sent) >= self.window:
            _let_go(sent, next(iter(sent)))
        sent[message] = _Transfer(x, self._axis(self.mesh.at.pp, peer).send(x, peer))

    def finish(self) -> None:
        """Wait until everything has been received."""
        for sent in self._sent.values():
            for message in list(sent):
                _let_go(sent, message)

    def _axis(self, source: int, target: int) -> Axis:
        return self.mesh.down if source < target else self.mesh.up


def _let_go(sent: dict[Message, _Transfer], message: Message) -> None:
    """Once `message` has gone, forget it, unless a full window has had it forgotten already."""
    if message in sent:
        sent.pop(message).pending.wait()


def open_channels(mesh: Mesh, wiring: Wiring, device: torch.device) -> None:
    """Send a number every way that stages of `wiring` will send, one after the other.

    NCCL connects two ranks when both have asked for it for the first time, and either waits for
    that: a receive that is posted before the sends it depends on would wait for ever.
    """
    me, number = mesh.at.pp, torch.zeros(1, device=device)
    borders = {(wiring.rank_of(s), wiring.rank_of(s + 1)) for s in range(wiring.stages - 1)}
    for source, target in sorted(borders | {(b, a) for a, b in borders}):
        axis = mesh.down if source < target else mesh.up
        if source == target or me not in (source, target):
            continue
        (axis.send(number, target) if me == source else axis.receive(number, source)).wait()
