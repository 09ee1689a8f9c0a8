"""Load, clock, power and heat of all chips while nothing changes: closed forms in time.

A chip draws what it draws at rest, and by work what grows with the square of its clock; its
temperature follows that as a first-order system (a heat capacity behind a thermal resistance). One
that would get too hot lowers its clock until it just holds the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from meshwright.control.engines.simulation.course import Course, Phase
from meshwright.control.engines.simulation.dice import Floats
from meshwright.control.engines.simulation.harm import Harm, Mask
from meshwright.control.engines.simulation.machine import LIMIT_C, TAU_S, Machine

SLOWEST = 0.2  # of the clock
WAITING = 0.2  # of the power of work that a chip takes while it waits for others
LOOP_S = 1.0  # in which a chip looks at its temperature
NEAR_C = 0.25  # of the limit: a chip that near is held back
_DETOUR = 3.0  # times as long is the way around links that are down, at least
_MOST_DETOUR = 20.0


@dataclass(frozen=True)
class Load:
    """Of each chip: shares of the time in which it computes (`compute`) and is `busy`, of its
    matrix units and of its memory's rate; what it holds and sends, and its steps a second."""

    compute: Floats
    busy: Floats
    tensor: Floats
    memory: Floats
    held_bytes: Floats
    sent_bytes_s: Floats
    steps_per_s: Floats
    clock: Floats
    throttled: Mask
    power_w: Floats
    target_c: Floats
    memory_target_c: Floats


@dataclass(frozen=True)
class Paces:
    """What a step of each run takes, and the rank that it waits for with how slow that is."""

    step_s: tuple[float, ...]
    slowest: tuple[tuple[int, float], ...]


def load(
    machine: Machine, harm: Harm, core_c: Floats, courses: Sequence[Course]
) -> tuple[Load, Paces]:
    """While nothing changes, from the moment at which chips are at `core_c`."""
    share = _Share(machine, harm, courses)
    capped = _capped(machine, harm, share.tensor_power)
    _, compute = share.pace(capped)
    alive = ~harm.dead
    demand = _power(machine, share, capped, compute)
    ambient_c = machine.ambient_c + harm.heat_c
    throttled = (
        alive & (core_c >= LIMIT_C - NEAR_C) & (ambient_c + machine.rise_c_w * demand > LIMIT_C)
    )
    hold_w = (LIMIT_C - ambient_c) / machine.rise_c_w
    clock = np.where(throttled, _clock_at(machine, share, compute, hold_w, capped), capped)
    paces, compute = share.pace(clock)
    power_w = np.where(alive, _power(machine, share, clock, compute), 0.0)
    busy, rate = share.busy(compute), share.rate(paces)
    tensor = compute * share.tensor
    memory = np.minimum(1.0, compute * 0.55)
    sent = _sent(machine, harm, share.link_bytes * rate)
    return (
        Load(
            compute=compute,
            busy=busy,
            tensor=tensor,
            memory=memory,
            held_bytes=np.minimum(share.held_bytes, machine.memory_bytes),
            sent_bytes_s=sent,
            steps_per_s=rate,
            clock=clock,
            throttled=throttled | (alive & (capped < harm.clock)),
            power_w=power_w,
            target_c=ambient_c + machine.rise_c_w * power_w,
            memory_target_c=ambient_c + 0.7 * machine.rise_c_w * power_w + 9.0 * memory,
        ),
        paces,
    )


def next_limit_s(core_c: Floats, now: Load) -> float:
    """Seconds until the first chip is seen to have reached the limit; inf: none will."""
    rising = (now.target_c > LIMIT_C + 1e-6) & (core_c < LIMIT_C - NEAR_C)
    if not rising.any():
        return inf
    start, end = core_c[rising], now.target_c[rising]
    return float(np.min(TAU_S * np.log((end - start) / (end - LIMIT_C)))) + LOOP_S


class _Share:
    """What each chip has of the runs."""

    def __init__(self, machine: Machine, harm: Harm, courses: Sequence[Course]) -> None:
        self._machine, self._harm, self._courses = machine, harm, courses
        count = machine.count
        self.tensor, self.link_bytes, self.held_bytes = (np.zeros(count) for _ in range(3))
        self.running, self.hanging = np.zeros(count, bool), np.zeros(count, bool)
        for course in courses:
            work, chips = course.begun.work, course.chips
            self.held_bytes[chips] = work.memory_bytes
            if course.spares:
                self.held_bytes[np.asarray(course.spares)] = work.memory_bytes
            if course.phase is Phase.RUNNING:
                self.running[chips] = True
                self.tensor[chips] = work.tensor
                self.link_bytes[chips] = work.link_bytes
            elif course.phase is Phase.TAKING_OVER:
                self.hanging[chips] = True
        self.held_bytes[harm.dead] = 0.0
        # Power of work: half of it goes with matrix units, the rest with memory and all else.
        self.tensor_power = np.where(self.running, 0.5 + 0.5 * self.tensor, 0.0)

    def pace(self, clock: Floats) -> tuple[Paces, Floats]:
        """Of each run with chips at `clock`, and the share of time in which each chip computes."""
        compute = np.zeros(self._machine.count)
        steps, slowest = [], []
        for course in self._courses:
            if course.phase is not Phase.RUNNING:
                steps.append(inf)
                slowest.append((0, 1.0))
                continue
            chips, work = course.chips, course.begun.work
            more = work.world / len(chips)  # what fewer replicas have to do each
            took = work.compute_s * more / (self._machine.speed[chips] * clock[chips])
            worst = int(np.argmax(took))
            links = float(np.max(_detour(self._machine, self._harm)[chips]))
            step_s = float(took[worst]) + work.comm_s * links
            compute[chips] = took / step_s
            steps.append(step_s)
            slowest.append((worst, float(took[worst] / np.median(took))))
        return Paces(tuple(steps), tuple(slowest)), compute

    def busy(self, compute: Floats) -> Floats:
        """A chip that waits in a collective looks busy; so does one that hangs."""
        working = np.minimum(1.0, compute + 0.9 * (1.0 - compute))
        return np.where(self.running, working, np.where(self.hanging, 1.0, 0.0))

    def rate(self, paces: Paces) -> Floats:
        """Steps a second of each chip."""
        found = np.zeros(self._machine.count)
        for course, step_s in zip(self._courses, paces.step_s, strict=True):
            found[course.chips] = 0.0 if step_s == inf else 1.0 / step_s
        return found


def _detour(machine: Machine, harm: Harm) -> Floats:
    """How much longer messages of each chip take by what is wrong with its links."""
    ratio = machine.link_bytes_s / max(1.0, machine.outer_bytes_s)
    cut = min(max(_DETOUR, ratio), _MOST_DETOUR)
    return np.where(harm.cut, cut, 1.0 / harm.link)


def _sent(machine: Machine, harm: Harm, sent: Floats) -> Floats:
    """What a chip without links cannot pass on goes by its neighbours."""
    if not harm.cut.any():
        return sent
    sent = sent.copy()
    for chip in np.flatnonzero(harm.cut & ~harm.dead):
        near = np.unique(machine.near[chip])
        near = near[near >= 0]
        if len(near):
            np.add.at(sent, near, sent[chip] / len(near))
        sent[chip] = min(0.5 * sent[chip], machine.outer_bytes_s)  # nothing passes through it
    return sent


def _power(machine: Machine, share: _Share, clock: Floats, compute: Floats) -> Floats:
    work = share.tensor_power * clock**2 * compute
    waits = np.where(share.running, WAITING * (1.0 - compute), np.where(share.hanging, 0.3, 0.0))
    return np.minimum(machine.idle_w + machine.busy_w * (work + waits), machine.power_w)


def _capped(machine: Machine, harm: Harm, intensity: Floats) -> Floats:
    """The clock that the cap of power leaves."""
    spare = np.maximum(harm.power * machine.power_w - machine.idle_w, 0.0)
    full = machine.busy_w * np.maximum(intensity, 1e-9)
    return np.where(
        harm.power < 1.0,
        np.minimum(harm.clock, np.clip(np.sqrt(spare / full), SLOWEST, 1.0)),
        harm.clock,
    )


def _clock_at(
    machine: Machine, share: _Share, compute: Floats, power_w: Floats, most: Floats
) -> Floats:
    """The clock at which a chip draws `power_w`."""
    waits = machine.busy_w * WAITING * (1.0 - compute)
    work = machine.busy_w * np.maximum(share.tensor_power * compute, 1e-9)
    left = np.maximum(power_w - machine.idle_w - waits, 0.0)
    return np.clip(np.sqrt(left / work), np.minimum(SLOWEST, most), most)
