"""A simulated cluster from its creation to a moment: what is, from one change to the next.

Between two changes everything is a closed form, so a moment costs no more than a look. What has
been worked out is kept; what turns out to have been otherwise is worked out again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from meshwright.base.events import Kind
from meshwright.control.engines.engine import ClusterOrder
from meshwright.control.engines.simulation import course as runs
from meshwright.control.engines.simulation.course import Course, Phase, Piece
from meshwright.control.engines.simulation.dice import Floats
from meshwright.control.engines.simulation.harm import FATAL, Harm, Mask, Span, active, harm
from meshwright.control.engines.simulation.heat import Load, Paces, load, next_limit_s
from meshwright.control.engines.simulation.machine import MEMORY_TAU_S, TAU_S, Machine, machine
from meshwright.control.engines.simulation.past import Begun, Change, Past, Reset, Stop
from meshwright.control.words import FaultKind

ECC_PER_S = 1 / 40_000.0  # corrected errors of a healthy chip: about two a day
LINK_PER_GB = 2e-7  # retries of a healthy link
LINK_DOWN_PER_S, LINK_SLOW_PER_S = 20.0, 2.0
WRONG_PER_S = 0.2  # failed executions of a busy chip that computes wrong numbers
_KEPT_CHIPS = 4_000_000  # of all epochs that are kept, so that memory stays bounded


@dataclass(frozen=True)
class State:
    """All chips and runs at `at_s`. Counters are of what was to be expected so far."""

    at_s: float
    machine: Machine
    replaced: tuple[tuple[int, int], ...]
    core_c: Floats
    memory_c: Floats
    steps: Floats
    ecc: Floats
    link: Floats
    fatal: Floats
    errors: Floats
    courses: tuple[Course, ...]


@dataclass(frozen=True)
class Epoch:
    """A state, and how things go on from it until `until_s` if nothing happens. `done` changes are
    behind it."""

    state: State
    harm: Harm
    load: Load
    until_s: float
    done: int

    def at(self, at_s: float) -> State:
        """Chips at a moment of it; runs are as they were, and `step_at` says how far they are."""
        state, now, passed_s = self.state, self.load, at_s - self.state.at_s
        core = np.exp(-passed_s / TAU_S)
        memory = np.exp(-passed_s / MEMORY_TAU_S)
        sent_gb_s = now.sent_bytes_s / 1e9
        retries = LINK_PER_GB * sent_gb_s
        retries = retries + np.where(self.harm.cut, LINK_DOWN_PER_S, 0.0)
        retries = retries + np.where(self.harm.link < 1.0, LINK_SLOW_PER_S, 0.0)
        wrong = np.where(self.harm.corrupt, WRONG_PER_S * now.busy, 0.0)
        return replace(
            state,
            at_s=at_s,
            core_c=now.target_c + (state.core_c - now.target_c) * core,
            memory_c=now.memory_target_c + (state.memory_c - now.memory_target_c) * memory,
            steps=state.steps + now.steps_per_s * passed_s,
            ecc=state.ecc + (ECC_PER_S + self.harm.ecc_per_s) * passed_s,
            link=state.link + retries * passed_s,
            errors=state.errors + wrong * passed_s,
        )


class World:
    """The epochs of one cluster."""

    def __init__(self, order: ClusterOrder) -> None:
        self._order = order
        self._past = Past((), ())
        self._epochs: list[Epoch] = []

    def epoch(self, order: ClusterOrder, past: Past, at_s: float) -> Epoch:
        """The epoch that `at_s` is in, if `past` is all that happens."""
        self._order = order
        self._forget(past)
        self._past = past
        if not self._epochs:
            self._epochs = [self._settle(self._first(), 0)]
        while (last := self._epochs[-1]).until_s <= at_s:
            self._epochs.append(self._next(last))
            most = max(4, _KEPT_CHIPS // max(1, order.chips))
            del self._epochs[:-most]
        found = (one for one in reversed(self._epochs) if one.state.at_s <= at_s)
        return next(found, self._epochs[0])

    def _forget(self, past: Past) -> None:
        """Drop what rests on changes that are not as they were."""
        if past is self._past:
            return
        old, new = self._past.changes, past.changes
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        firsts = [changes[same].at_s for changes in (old, new) if same < len(changes)]
        begin_s = min(firsts, default=inf)
        self._epochs = [one for one in self._epochs if one.state.at_s < begin_s]
        if self._epochs:  # the last one may end sooner or later than it would have
            last = self._epochs.pop()
            self._epochs.append(self._settle(last.state, last.done, past))

    def _first(self) -> State:
        chips = machine(self._order, {})
        zero = np.zeros(chips.count)
        cold = chips.ambient_c + chips.rise_c_w * chips.idle_w
        return State(0.0, chips, (), cold, cold, zero, zero, zero, zero, zero, ())

    def _next(self, last: Epoch) -> Epoch:
        """What comes after `last`: all that happens at its end."""
        at_s, changes = last.until_s, self._past.changes
        state, done = _moved(last, at_s), last.done
        struck = np.zeros(state.machine.count, bool)
        while done < len(changes) and changes[done].at_s <= at_s:
            state = self._apply(state, changes[done], struck)
            done += 1
        now = harm(state.machine, active(self._past.spans, at_s))
        courses = tuple(runs.happen(one, now, struck, at_s) for one in state.courses)
        return self._settle(replace(state, courses=courses), done)

    def _apply(self, state: State, change: Change, struck: Mask) -> State:
        at_s = change.at_s
        match change.what:
            case Begun():
                others = [one for one in state.courses if one.begun.key != change.what.key]
                return replace(state, courses=(*others, runs.begin(change.what, at_s)))
            case Stop(job, attempt):
                return replace(
                    state,
                    courses=tuple(
                        runs.stop(one, change.what, at_s)
                        if one.begun.key == (job, attempt)
                        else one
                        for one in state.courses
                    ),
                )
            case Reset():
                struck[state.machine.node(change.what.node)] = True
                return self._reset(state, change.what)
        span = change.span
        if span is not None and span.since_s == at_s and span.id:
            return _wounded(state, span)
        return state

    def _reset(self, state: State, reset: Reset) -> State:
        """Counters of a machine begin with it; a new one is cold."""
        chips, made = state.machine, dict(state.replaced)
        if reset.replaced is not None:
            made[reset.node] = reset.replaced
            chips = machine(self._order, made)
        here = chips.node(reset.node)
        fields = {}
        for name in ("steps", "ecc", "link", "fatal", "errors"):
            values = getattr(state, name).copy()
            values[here] = 0.0
            fields[name] = values
        return replace(state, machine=chips, replaced=tuple(sorted(made.items())), **fields)

    def _settle(self, state: State, done: int, past: Past | None = None) -> Epoch:
        """How things go on from `state`."""
        past = past or self._past
        now = harm(state.machine, active(past.spans, state.at_s))
        going = [one for one in state.courses if not one.over]
        found, paces = load(state.machine, now, state.core_c, going)
        state = replace(state, courses=_paced(state, going, paces))
        until_s = state.at_s + next_limit_s(state.core_c, found)
        if done < len(past.changes):
            until_s = min(until_s, past.changes[done].at_s)
        for one, step_s in zip(going, paces.step_s, strict=True):
            if one.phase is Phase.RUNNING:
                left_s = max(0.0, one.goal - one.step) * step_s
                until_s = min(until_s, state.at_s + left_s)
            else:
                until_s = min(until_s, one.until_s)
        return Epoch(state, now, found, until_s, done)


def _moved(last: Epoch, at_s: float) -> State:
    """The state at the end of an epoch, runs included."""
    state = last.at(at_s)
    courses = tuple(
        replace(one, step=step_at(one, at_s)) if one.phase is Phase.RUNNING else one
        for one in state.courses
    )
    return replace(state, courses=courses)


def step_at(course: Course, at_s: float) -> float:
    """How far a run is at a moment of its last piece."""
    if course.over or not course.pieces:
        return course.step
    last = course.pieces[-1]
    return min(float(course.goal), last.step + max(0.0, at_s - last.since_s) / last.step_s)


def _paced(state: State, going: list[Course], paces: Paces) -> tuple[Course, ...]:
    """Runs with the pace at which they go on, which is written down where it is another."""
    found = {one.begun.key: one for one in state.courses}
    for one, step_s, (rank, ratio) in zip(going, paces.step_s, paces.slowest, strict=True):
        piece = Piece(state.at_s, one.step, step_s, len(one.table))
        last = one.pieces[-1] if one.pieces else None
        begins_anew = last is not None and last.step_s == inf and last.step != one.step
        if last is None or (last.step_s, last.chips) != (step_s, piece.chips) or begins_anew:
            one = replace(one, pieces=(*one.pieces, piece))
        key = f"straggler/{one.epoch}/{rank}"
        if ratio > runs.SLOW and key not in one.slow:
            chip = one.table[rank]
            said = {"rank": rank, "member": chip, "busy_ratio": ratio, "step": int(one.step) + 1}
            one = runs.tell(one, state.at_s, key, Kind.STRAGGLER, **said)
            one = replace(one, slow=one.slow | {key})
        found[one.begun.key] = one
    return tuple(found.values())


def _wounded(state: State, span: Span) -> State:
    """Counters of errors, when a fault begins."""
    if span.kind not in FATAL or span.kind is FaultKind.NODE_DOWN:
        return state
    errors, fatal = state.errors.copy(), state.fatal.copy()
    errors[span.chips] += 1.0
    if span.kind is FaultKind.MEMORY_FATAL:
        fatal[span.chips] += 1.0
    return replace(state, errors=errors, fatal=fatal)
