"""What the state of a rank without twins came to, told to the next rank: whoever takes the rank
when it is lost can be held against it before its first vote, by whatever way the state came. Twins
compare their states before each vote.
"""

from __future__ import annotations

import torch

from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.line import Line

_CHANNEL = (1 << 20) + 4  # far from those of keepers

Seen = tuple[int, int, int]  # rank, steps in its state, and the sum of that (`agreement.bits`)


class Witness:
    """One rank's part. `seen` is what it was told last of the rank before it."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._to: Line | None = None
        self._mine: tuple[int, int] | None = None
        self.seen: Seen | None = None

    def begin(self) -> None:
        """At a new table, once all have their state: tell it anew, and hear."""
        world, rank = len(self._fabric.table.members), self._fabric.rank
        self._to = None
        if world == 1:
            return
        self._to = Line(self._fabric, (rank + 1) % world, _CHANNEL)
        before = (rank - 1) % world
        self._hear(Line(self._fabric, before, _CHANNEL), before)
        if self._mine is not None:
            self.tell(*self._mine)

    def _hear(self, line: Line, rank: int) -> None:
        place = torch.zeros(2, dtype=torch.int64)

        def come() -> None:
            applied, total = place.tolist()
            self.seen = rank, applied, total
            self._hear(line, rank)

        line.receive([place], come)

    def tell(self, applied: int, total: int) -> None:
        """This rank's state with so many steps in it comes to `total`."""
        self._mine = applied, total
        if self._to is not None:
            self._to.send([torch.tensor([applied, total])])

    def forget(self) -> None:
        """Ranks are other ranks from now on, or this member has none any more."""
        self._to = self._mine = self.seen = None
