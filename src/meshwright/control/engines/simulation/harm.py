"""Faults and what clears them, as stretches of simulated time, and what they do to chips."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.control.engines.simulation.dice import Floats
from meshwright.control.engines.simulation.machine import Machine
from meshwright.control.words import FaultKind

Mask = npt.NDArray[np.bool_]

# What a power cycle puts right; the rest is in silicon, cables, cooling or the network.
REBOOT_CLEARS = frozenset(
    {FaultKind.CHIP_DEAD, FaultKind.MEMORY_FATAL, FaultKind.POWER_CAP, FaultKind.NODE_DOWN}
)
SHARES = frozenset({FaultKind.CHIP_SLOW, FaultKind.POWER_CAP, FaultKind.LINK_SLOW})
MOST_LOST = 0.95  # of a speed, a rate or a power
MOST_HEAT_C = 60.0  # what no cooling at all comes to
FATAL = frozenset({FaultKind.CHIP_DEAD, FaultKind.MEMORY_FATAL, FaultKind.NODE_DOWN})


@dataclass(frozen=True)
class Span:
    """A fault of chips `first` to `last` (not included), from `since_s` to `until_s` in simulated
    seconds."""

    id: str
    kind: FaultKind
    first: int
    last: int
    severity: float
    since_s: float
    until_s: float

    @property
    def chips(self) -> slice:
        """That it is on."""
        return slice(self.first, self.last)


@dataclass(frozen=True)
class Harm:
    """What faults do to each chip at a moment. `gone`: it does not answer, `down`: its node has no
    power, `fatal`: its memory has failed, `hidden`: nobody can see it; `link` is the share of its
    rate that is left."""

    gone: Mask
    down: Mask
    fatal: Mask
    hidden: Mask
    corrupt: Mask
    cut: Mask
    clock: Floats
    power: Floats
    heat_c: Floats
    link: Floats
    ecc_per_s: Floats

    @property
    def dead(self) -> Mask:
        """Computes no more."""
        return self.gone | self.down | self.fatal


def active(spans: Iterable[Span], at_s: float) -> tuple[Span, ...]:
    """Those that are there at `at_s`."""
    return tuple(span for span in spans if span.since_s <= at_s < span.until_s)


def harm(machine: Machine, spans: Sequence[Span]) -> Harm:
    """What `spans` do together."""
    off = {
        name: np.zeros(machine.count, bool)
        for name in ("gone", "down", "fatal", "hidden", "corrupt", "cut")
    }
    clock, power, link = (np.ones(machine.count) for _ in range(3))
    heat_c, ecc = np.zeros(machine.count), np.zeros(machine.count)
    masks = {
        FaultKind.CHIP_DEAD: "gone",
        FaultKind.NODE_DOWN: "down",
        FaultKind.MEMORY_FATAL: "fatal",
        FaultKind.NODE_UNREACHABLE: "hidden",
        FaultKind.CHIP_CORRUPT: "corrupt",
        FaultKind.LINK_DOWN: "cut",
    }
    for span in spans:
        chips, left = span.chips, 1.0 - min(span.severity, MOST_LOST)
        if name := masks.get(span.kind):
            off[name][chips] = True
        match span.kind:
            case FaultKind.CHIP_SLOW:
                clock[chips] *= left
            case FaultKind.POWER_CAP:
                power[chips] = np.minimum(power[chips], left)
            case FaultKind.OVERHEAT:
                heat_c[chips] = np.minimum(heat_c[chips] + span.severity, MOST_HEAT_C)
            case FaultKind.MEMORY_ERRORS:
                ecc[chips] += span.severity
            case FaultKind.LINK_SLOW:
                link[chips] *= left
    return Harm(**off, clock=clock, power=power, heat_c=heat_c, link=link, ecc_per_s=ecc)
