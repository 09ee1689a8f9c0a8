"""What somebody waits for: frames that come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Turning(Protocol):
    """The fabric, for those who wait."""

    def hold(self) -> None:
        """Let no table come in between."""

    def let_go(self) -> None:
        """It may."""

    def wait(self, op: Operation) -> None:
        """Turn until `op` is done. Raises Interrupted."""


class Operation:
    """Frames that are waited for together; once all have come and gone, `then` runs, which may
    begin others."""

    __slots__ = ("_fabric", "inside", "missing", "then")

    def __init__(
        self, fabric: Turning, then: Callable[[], object] | None = None, inside: bool = False
    ) -> None:
        """Until it has `begun`, no table comes in between."""
        self._fabric, self.then, self.inside = fabric, then, inside
        self.missing = 1  # until all have been begun: see `begun`
        fabric.hold()

    def begun(self) -> Operation:
        """Nothing more will be asked for, but by `then`."""
        self.one_done()
        self._fabric.let_go()
        return self

    def one_done(self) -> None:
        """One of what it waits for is done."""
        self.missing -= 1
        if not self.missing and self.then is not None:
            then, self.then = self.then, None
            self.missing = 1
            then()
            self.one_done()

    def wait(self) -> None:
        """Block until everything is done. Raises Interrupted."""
        self._fabric.wait(self)
