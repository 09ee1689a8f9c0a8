"""A member of a run that has its redundancy and its checks switched off and on again in turn, every
few steps, and says what each step and they took of its processor.

Only for measuring: what is switched off for some steps could not be used for a takeover after them.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from meshwright.base.events import WorkerContext
from meshwright.train import agreement, worker
from meshwright.train.gradients import Vote
from meshwright.train.trainer import Guard, Redundancy, Trainer
from meshwright.train.witness import Witness

FOLDER = "SURVIVAL_COST_FOLDER"  # of the environment: where members write what they have found
CONDUCTOR = "SURVIVAL_COST_CONDUCTOR"  # its process
WARM_UP = 4  # steps
TURNS = ("all", "fabric alone")  # what there is, each for `BLOCK` steps; the first does not count
BLOCK = 3
_TICKS_S = os.sysconf("SC_CLK_TCK")


def turn_of(step: int) -> str | None:
    """What there is at `step`, from 0; None in the warm-up."""
    return None if step < WARM_UP else TURNS[(step - WARM_UP) // BLOCK % len(TURNS)]


def counts(step: int) -> bool:
    """Whether `step` follows on one like it."""
    return turn_of(step) is not None and turn_of(step) == turn_of(step - 1)


def cpu_s(pid: int) -> float:
    """Seconds of processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


class Timed:
    """What `inner` does, and the seconds of processor that it takes, by `name`."""

    def __init__(self, inner: Any, name: str, spent: Counter[str]) -> None:
        self._inner, self._name, self._spent = inner, name, spent

    def __getattr__(self, method: str) -> Any:
        return timed(getattr(self._inner, method), self._name, self._spent)


def timed(call: Callable[..., Any], name: str, spent: Counter[str]) -> Callable[..., Any]:
    """`call`, which adds the seconds of processor that it takes to those of `name`."""

    def calls(*args: Any, **more: Any) -> Any:
        begun_s = time.process_time()
        try:
            return call(*args, **more)
        finally:
            spent[name] += time.process_time() - begun_s  # type: ignore[assignment] # seconds

    return calls


class Turns:
    """What one rank has found, by step: seconds of processor, seconds, and the parts of those of
    the processor."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, float, dict[str, float]]] = []
        self.others: list[tuple[float, float]] = []  # agent and conductor, at each step
        self.spent: Counter[str] = Counter()
        self.now: str | None = None
        self._guard: Guard | None = None
        self._redundancy: Redundancy | None = None
        self._begun = (0, 0.0, 0.0)

    def begin(self, trainer: Trainer, step: int) -> None:
        """`step` is about to be computed: so the one before is over."""
        before, cpu, wall = self._begun
        if counts(before):
            times_s = time.process_time() - cpu, time.perf_counter() - wall
            self.steps.append((before, *times_s, dict(self.spent)))
        if step == 0:
            self._guard = cast(Guard, Timed(trainer.guard, "checks", self.spent))
            if trainer.redundancy is not None:
                kept = Timed(trainer.redundancy, "redundancy", self.spent)
                self._redundancy = cast(Redundancy, kept)
        turn = turn_of(step) or "all"
        if turn != self.now:
            self._switch(trainer, turn)
        pids = os.getppid(), int(os.environ[CONDUCTOR])
        self.others.append((cpu_s(pids[0]), cpu_s(pids[1])))
        self.spent.clear()
        self._begun = step, time.process_time(), time.perf_counter()

    def _switch(self, trainer: Trainer, turn: str) -> None:
        self.now, all_of_it = turn, turn == "all"
        trainer.redundancy = self._redundancy if all_of_it else None
        trainer.guard = self._guard if all_of_it else None
        if trainer.guard is not None and trainer.applied:
            trainer.guard.after_update()  # the state is new to it


def main(context: WorkerContext) -> None:
    """In the place of `meshwright.train.worker.main`."""
    turns, gradients, verify = Turns(), Trainer.gradients, agreement.Guard.verify

    def taking_turns(self: Trainer, batches: Tensor, *args: Any, **more: Any) -> Vote:
        step = args[1] if len(args) > 1 else more.get("step", 0)
        if self.mesh.layout.world == context.world:  # else a spare that gets warm
            turns.begin(self, step)
        return gradients(self, batches, *args, **more)

    def verifying(self: agreement.Guard, step: int) -> None:
        if turns.now != "fabric alone":  # it has not seen the last updates
            verify(self, step)

    for owner, name, value in (
        (Trainer, "gradients", taking_turns),
        (agreement.Guard, "verify", verifying),
        (Witness, "tell", timed(Witness.tell, "witness", turns.spent)),
    ):
        setattr(owner, name, value)
    worker.main(context)
    found = {"steps": turns.steps, "others": turns.others}
    place = Path(os.environ[FOLDER]) / f"member-{context.member}.json"
    place.write_text(json.dumps(found))
