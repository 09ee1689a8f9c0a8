"""The course of one run on a simulated cluster: what becomes of it at each thing that happens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, floor, inf
from typing import Any

import numpy as np

from meshwright.base.events import Kind
from meshwright.conduct.places import shrunk
from meshwright.control.engines.simulation.dice import uniform
from meshwright.control.engines.simulation.harm import Harm, Mask
from meshwright.control.engines.simulation.machine import Ints
from meshwright.control.engines.simulation.past import Begun, Stop

START_S = 1.0  # until all ranks are ready
RESIZE_S = 0.8
SLOW = 1.2  # times the step of its like, from which a rank is named
TOLD_RANKS = 64  # of which it is told that they are ready
_UNSAVED = "ended at once: what came after the last checkpoint is lost"


class Phase(StrEnum):
    """What a run is at."""

    STARTING = "starting"
    RUNNING = "running"
    TAKING_OVER = "taking_over"
    WAITING = "waiting"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        """Nothing of it runs any more."""
        return self in (Phase.FINISHED, Phase.STOPPED, Phase.FAILED)


@dataclass(frozen=True)
class Piece:
    """From `since_s` on, when it had done `step` steps (the last may be a part), a step takes
    `step_s`; inf: it stands still."""

    since_s: float
    step: float
    step_s: float
    chips: int


@dataclass(frozen=True)
class Told:
    """An event as it will be written, once its time has come."""

    at_s: float
    key: str  # of this attempt: it is written once
    kind: Kind
    fields: dict[str, Any]


@dataclass(frozen=True)
class Loss:
    """What is being made good; members count from the ranks on."""

    since_s: float
    ranks: tuple[int, ...]
    cause: str
    detected_s: float
    resized: tuple[str, str] | None = None


@dataclass(frozen=True)
class Course:
    """A run so far. `table` has the chip of each rank; `goal` is the step it ends with; `until_s`
    is when its phase is over by itself."""

    begun: Begun
    phase: Phase
    step: float
    goal: int
    table: tuple[int, ...]
    spares: tuple[int, ...]
    until_s: float
    pieces: tuple[Piece, ...] = ()
    told: tuple[Told, ...] = ()
    epoch: int = 0
    losses: tuple[Loss, ...] = ()
    slow: frozenset[str] = frozenset()  # alerts that were given
    bad: frozenset[int] = frozenset()  # chips that are not used again
    spoiled: int | None = None
    ended_s: float = inf
    message: str = ""

    @property
    def chips(self) -> Ints:
        """The table as an index."""
        return np.asarray(self.table, np.int64)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.phase.over


def begin(begun: Begun, at_s: float) -> Course:
    """A run that starts now."""
    first = Course(
        begun,
        Phase.STARTING,
        float(begun.resumed),
        begun.work.steps,
        begun.chips[: begun.ranks],
        begun.chips[begun.ranks :],
        at_s + START_S,
    )
    fields = {
        "world": begun.ranks,
        "layout": begun.work.labels[max(begun.work.labels)],
        "resumed_from": begun.resumed or None,
        "attempt": begun.attempt,
        "step_time": begun.work.origin,
    }
    return tell(first, at_s, "run_started", Kind.RUN_STARTED, **fields)


def tell(course: Course, at_s: float, key: str, kind: Kind, **fields: Any) -> Course:
    """`course` with one more event."""
    return replace(course, told=(*course.told, Told(at_s, key, kind, fields)))


def stop(course: Course, asked: Stop, at_s: float) -> Course:
    """It shall end: after the step in flight, or at once."""
    if course.over:
        return course
    if asked.hard:
        return _end(course, Phase.STOPPED, at_s, floor(course.step), _UNSAVED)
    course = replace(course, goal=min(course.goal, ceil(course.step - 1e-9)))
    if course.phase is Phase.WAITING:
        return _end(course, Phase.STOPPED, at_s, floor(course.step), "")
    return course


def happen(course: Course, harm: Harm, struck: Mask, at_s: float) -> Course:
    """What becomes of it at `at_s`, when chips are as `harm` says and what ran on those `struck`
    has ended."""
    if course.over:
        return course
    if course.phase is Phase.RUNNING and course.step >= course.goal - 1e-6:
        return _arrive(course, at_s)
    course = _convict(course, harm, at_s)
    bad = np.isin(course.chips, list(course.bad))
    vacant = np.flatnonzero(harm.dead[course.chips] | struck[course.chips] | bad)
    if len(vacant):
        return _lose(course, harm, vacant, at_s)
    if course.phase is Phase.WAITING:
        return _take_over(course, at_s)
    if course.phase is not Phase.RUNNING and at_s >= course.until_s:
        return _go_on(course, at_s)
    return course


def _arrive(course: Course, at_s: float) -> Course:
    finished = course.goal >= course.begun.work.steps
    return _end(course, Phase.FINISHED if finished else Phase.STOPPED, at_s, course.goal, "")


def _end(course: Course, phase: Phase, at_s: float, step: int, message: str) -> Course:
    kind = {
        Phase.FINISHED: Kind.RUN_FINISHED,
        Phase.STOPPED: Kind.RUN_INTERRUPTED,
        Phase.FAILED: Kind.RUN_FAILED,
    }[phase]
    wall_s = at_s - course.begun.since_s
    course = tell(course, at_s, str(kind), kind, step=step, wall_s=wall_s, error=message or None)
    return replace(
        course, phase=phase, step=float(step), ended_s=at_s, until_s=inf, message=message
    )


def _go_on(course: Course, at_s: float) -> Course:
    """Every rank runs."""
    step = floor(course.step + 1e-9)
    if course.phase is Phase.STARTING:
        for rank in range(min(len(course.table), TOLD_RANKS)):
            key = f"rank_ready/{rank}"
            course = tell(course, at_s, key, Kind.RANK_READY, rank=rank, step=step + 1)
        for place in range(len(course.spares)):
            member = course.begun.ranks + place
            course = tell(course, at_s, f"spare_ready/{member}", Kind.SPARE_READY, member=member)
    for loss in course.losses:
        course = _account(course, loss, step, at_s)
    return replace(course, phase=Phase.RUNNING, step=float(step), until_s=inf, losses=())


def _account(course: Course, loss: Loss, step: int, at_s: float) -> Course:
    key = f"{loss.since_s:.6f}/{'-'.join(map(str, loss.ranks))}"
    took_s = at_s - loss.since_s
    if loss.resized is not None:
        before, after = loss.resized
        fields = {"epoch": course.epoch, "step": step, "before": before, "after": after}
        return tell(course, at_s, f"resized/{key}", Kind.RESIZED, **fields, resize_s=took_s)
    return tell(
        course,
        at_s,
        f"takeover_done/{key}",
        Kind.TAKEOVER_DONE,
        epoch=course.epoch,
        ranks=list(loss.ranks),
        cause=loss.cause,
        detected_s=loss.detected_s,
        takeover_s=took_s,
        step=step + 1,
        lost_steps=0,
    )


def _convict(course: Course, harm: Harm, at_s: float) -> Course:
    """A chip that computes wrong numbers is found by its twins, if the run has that; else what it
    computes spoils what is learnt."""
    wrong = np.flatnonzero(harm.corrupt[course.chips])
    fresh = [int(rank) for rank in wrong if course.table[rank] not in course.bad]
    if not fresh or course.phase is not Phase.RUNNING:
        return course
    step = floor(course.step) + 1
    if not course.begun.work.survives:
        return course if course.spoiled is not None else replace(course, spoiled=step)
    for rank in fresh:
        what, key = "gradients differ from those of its twins", f"{at_s:.6f}/{rank}"
        said = {"step": step, "what": what, "suspects": [rank], "certain": True, "redo": True}
        course = tell(course, at_s, f"corrupt/{key}", Kind.CORRUPT, rank=rank, **said)
        given = {"rank": rank, "member": None, "step": step, "cause": what}
        course = tell(course, at_s, f"quarantined/{key}", Kind.QUARANTINED, **given)
        course = replace(course, bad=course.bad | {course.table[rank]})
    return course


def _lose(course: Course, harm: Harm, vacant: Ints, at_s: float) -> Course:
    ranks = tuple(int(rank) for rank in vacant)
    known = {rank for loss in course.losses for rank in loss.ranks}
    waiting = course.phase is Phase.WAITING
    step, work = floor(course.step), course.begun.work
    cause = _cause(course, harm, ranks[0])
    detected_s = 0.05 + 0.2 * float(uniform(work.seed, course.epoch, ranks[0])[0])
    if not waiting or not known.issuperset(ranks):
        course = _mourn(course, harm, ranks, at_s, detected_s)
        loss = Loss(at_s, ranks, cause, detected_s)
        course = replace(course, step=float(step), losses=(*course.losses, loss))
    if course.phase is Phase.STARTING or not work.survives:
        error = f"rank {ranks[0]} was lost at step {step + 1}: {cause}"
        return _end(course, Phase.FAILED, at_s + detected_s, step, error)
    free = [c for c in course.spares if not harm.dead[c] and c not in course.bad]
    if len(free) >= len(ranks):
        table = list(course.table)
        for rank, chip in zip(ranks, free, strict=False):
            table[rank] = chip
        taken = set(free[: len(ranks)])
        left = tuple(chip for chip in course.spares if chip not in taken)
        return _take_over(replace(course, table=tuple(table), spares=left), at_s)
    return _without_spare(course, harm, ranks, at_s)


def _without_spare(course: Course, harm: Harm, ranks: tuple[int, ...], at_s: float) -> Course:
    work, step = course.begun.work, floor(course.step)
    back = [
        r for r in ranks if not harm.dead[course.table[r]] and course.table[r] not in course.bad
    ]
    if len(back) == len(ranks):  # the machine is there again: its chips take their ranks back
        return _take_over(course, at_s)
    if work.shrinks:
        living = {c for r, c in enumerate(course.table) if r not in ranks}
        found = shrunk(course.table, living, work.shapes)
        if found is None:
            error = f"no spare for ranks {list(ranks)}, and no smaller layout holds the state"
            ended_s = at_s + course.losses[-1].detected_s
            return _end(course, Phase.FAILED, ended_s, step, error)
        before = work.labels[work.shapes.replicas(len(course.table))]
        last = replace(course.losses[-1], resized=(before, work.labels[found[0]]))
        course = replace(course, table=found[1], losses=(*course.losses[:-1], last))
        return _take_over(course, at_s, RESIZE_S)
    if course.phase is Phase.WAITING:
        return course
    what = f"ranks {list(ranks)} wait for a free chip"
    course = tell(course, at_s, f"alert/{at_s:.6f}", Kind.ALERT, what=what, node=None)
    return replace(course, phase=Phase.WAITING, until_s=inf)


def _take_over(course: Course, at_s: float, longer_s: float = 0.0) -> Course:
    epoch = course.epoch + 1
    took_s = 0.3 + 0.3 * float(uniform(course.begun.work.seed, epoch, 7)[0]) + longer_s
    return replace(course, phase=Phase.TAKING_OVER, epoch=epoch, until_s=at_s + took_s)


def _cause(course: Course, harm: Harm, rank: int) -> str:
    chip = course.table[rank]
    for there, words in (
        (harm.down[chip], "its node lost power"),
        (harm.gone[chip], "its chip fell off the bus"),
        (harm.fatal[chip], "its memory had an uncorrected error"),
        (chip in course.bad, "its chip computes wrong numbers"),
    ):
        if there:
            return words
    return "its node began anew"


def _mourn(
    course: Course, harm: Harm, ranks: tuple[int, ...], at_s: float, detected_s: float
) -> Course:
    """Say who is lost; a chip that fell off the bus is seen by that its rank hangs."""
    seen_s, step = at_s + detected_s, floor(course.step) + 1
    for rank in ranks:
        chip, key = course.table[rank], f"{at_s:.6f}/{rank}"
        who = {"rank": rank, "member": chip, "step": step}
        cause = _cause(course, harm, rank)
        if harm.gone[chip] and not harm.down[chip]:
            hung = {"phase": "collective", "stalled_s": detected_s, "cause": "hung in collective"}
            course = tell(course, seen_s, f"hang/{key}", Kind.HANG, **who, **hung)
        lost = {"cause": cause, "pid": None, "signal": "SIGKILL", "exit_code": None, "log": None}
        course = tell(course, seen_s, f"rank_lost/{key}", Kind.RANK_LOST, **who, **lost)
    return course
