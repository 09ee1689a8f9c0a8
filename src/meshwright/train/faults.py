"""Faults that a drill or a test arms: a member does itself harm at a moment of its choice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.base.pulse import Phase

Harm = Literal["kill", "segfault", "freeze", "exit", "slow", "corrupt"]


@dataclass(frozen=True)
class Fault:
    """`member` does itself `kind` at the `times`-th time that it enters `phase` in `step` (from 1).

    "slow": from then on it sleeps `share` of the time that each phase has taken. "corrupt": flips
    a bit of the exponent of element `element` of its first `what`, of an "update" as soon as it is
    made; a "rate" is doubled.
    """

    member: int
    step: int
    phase: str
    kind: Harm = "kill"
    times: int = 1
    share: float = 1.0
    what: Literal["weight", "gradient", "update", "rate"] = "weight"
    element: int = 0

    @classmethod
    def all_from(cls, args: Sequence[dict[str, Any]]) -> list[Fault]:
        """The faults of a list of tables."""
        return [cls(**fields) for fields in args]


class Faults:
    """The faults of one member; `corrupt` does the harm that needs the trainer."""

    def __init__(
        self, member: int, faults: Sequence[Fault], corrupt: Callable[[Fault], object]
    ) -> None:
        self._armed = [fault for fault in faults if fault.member == member]
        self._corrupt = corrupt
        self._entered: dict[Fault, int] = {}
        self._drag, self._since_s = 0.0, time.monotonic()

    def enter(self, step: int, phase: Phase) -> None:
        """This step is at this phase now."""
        if self._drag:
            time.sleep(self._drag * (time.monotonic() - self._since_s))
        self._since_s = time.monotonic()
        for fault in [f for f in self._armed if f.step == step and Phase[f.phase.upper()] == phase]:
            self._entered[fault] = self._entered.get(fault, 0) + 1
            if self._entered[fault] == fault.times:
                self._armed.remove(fault)
                self._do(fault)

    def _do(self, fault: Fault) -> None:
        if fault.kind == "slow":
            self._drag = fault.share
        elif fault.kind == "corrupt":
            self._corrupt(fault)
        elif fault.kind == "exit":
            os._exit(3)
        else:
            numbers = {"segfault": signal.SIGSEGV, "freeze": signal.SIGSTOP}
            os.kill(os.getpid(), numbers.get(fault.kind, signal.SIGKILL))
