"""Numbered messages between two places of a table, in the order in which they are sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.group import bytes_of, json_tensors
from meshwright.train.fabric.operation import Operation


class Line:
    """This member's end of what it and whoever holds `place` say to each other while the table at
    hand lasts. Nothing here raises Interrupted: only `Operation.wait` does.

    It sends on `channel`, and hears what comes on `back`, which is another one where two talks of
    the same two places go on at once.
    """

    def __init__(self, fabric: Fabric, place: int, channel: int, back: int | None = None) -> None:
        self._fabric, self._place, self._channel = fabric, place, channel
        self._back = channel if back is None else back
        self._sent = self._got = 0

    def send(
        self, tensors: Sequence[Tensor], then: Callable[[], object] | None = None
    ) -> Operation:
        """They stay as they are until it is done."""
        op = Operation(self._fabric, then)
        for data in [bytes_of(x) for x in tensors if x.numel()]:
            self._sent += 1
            self._fabric.send(op, self._place, self._channel, self._sent, data)
        return op.begun()

    def receive(
        self, tensors: Sequence[Tensor], then: Callable[[], object] | None = None
    ) -> Operation:
        """The counterpart of `send`, of tensors of the same sizes."""
        op = Operation(self._fabric, then)
        for place in [bytes_of(x) for x in tensors if x.numel()]:
            self._got += 1
            self._fabric.receive(op, self._place, self._back, self._got, place)
        return op.begun()

    def say(self, fields: dict[str, Any]) -> Operation:
        """Send plain JSON."""
        return self.send(json_tensors(fields))

    def hear(self, then: Callable[[dict[str, Any]], object]) -> Operation:
        """The counterpart of `say`; `then` gets what was said."""
        size = torch.zeros(1, dtype=torch.int64)
        data = torch.zeros(0, dtype=torch.uint8)

        def read() -> None:
            nonlocal data
            data = torch.empty(int(size), dtype=torch.uint8)
            self._got += 1
            self._fabric.receive(op, self._place, self._back, self._got, bytes_of(data))
            op.then = lambda: then(json.loads(bytes(bytes_of(data))))

        op = Operation(self._fabric, read)
        self._got += 1
        self._fabric.receive(op, self._place, self._back, self._got, bytes_of(size))
        return op.begun()
