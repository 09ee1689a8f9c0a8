"""Who holds a run up: pure, from what was seen of all its ranks.

A verdict rests on positive evidence. A process that the kernel calls stopped is frozen. A rank is
hung if it has been silent for longer than what it is at may take, nobody else gets on, and the
waits of the others lead to it: each says whom it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.base.pulse import Phase, Pulse
from meshwright.conduct.limits import Limits

_STOPPED = frozenset("T")
_BLOCKED = frozenset("tD")


@dataclass(frozen=True)
class Sample:
    """One member at one moment, as `watching.Watch` makes it; `rank` is None for a spare.

    `quiet_s` is how long it has written nothing into its pulse, `state` the letter of
    /proc/PID/stat, `state_s` how long it has been in that state at every look. Ranks with the same
    `role` do the same work.
    """

    rank: int | None
    member: int
    role: str
    pulse: Pulse
    quiet_s: float
    state: str = "S"
    state_s: float = 0.0


@dataclass(frozen=True)
class Frozen:
    """A process that is stopped, held by a debugger, or stuck in the kernel."""

    rank: int | None
    member: int
    state: str
    frozen_s: float


@dataclass(frozen=True)
class Hang:
    """A member that the others wait for, and that does nothing.

    `certain` is false where no wait leads to it: everyone waits, and it is only the one that has
    come least far (a message was lost, or ranks disagree on what to do next); or nobody does.
    """

    rank: int | None
    member: int
    step: int
    phase: Phase
    stalled_s: float
    certain: bool


Verdict = Frozen | Hang


def judge(samples: Sequence[Sample], limits: Limits) -> tuple[Verdict, ...]:
    """Who is at fault now, one verdict a member, in their order; nobody while anyone gets on.

    `samples` are of all members that live, of every machine. Where one is frozen, that is all:
    those who seem hung wait for it.
    """
    ordered = sorted(samples, key=lambda sample: sample.member)
    if frozen := tuple(_frozen(sample) for sample in ordered if _is_frozen(sample, limits)):
        return frozen
    working = [sample for sample in ordered if sample.pulse.phase is not Phase.IDLE]
    if not working or any(_gets_on(sample, limits) for sample in working):
        return ()
    if any(sample.pulse.waits for sample in working):
        return _culprits(working, ordered)
    # All are at work and silent: a slow step, or a file server that holds all of them up.
    longest = max(working, key=lambda sample: sample.quiet_s)
    overdue = longest.quiet_s >= limits.longest_stall_s
    return (_hang(longest, certain=len(working) == 1),) if overdue else ()


def _is_frozen(sample: Sample, limits: Limits) -> bool:
    if sample.state in _STOPPED:
        return sample.state_s >= limits.frozen_s
    return sample.state in _BLOCKED and sample.state_s >= limits.blocked_s


def _frozen(sample: Sample) -> Frozen:
    return Frozen(sample.rank, sample.member, sample.state, sample.state_s)


def _gets_on(sample: Sample, limits: Limits) -> bool:
    """Whether what it is at may still end by itself. To one who waits the limit of a step applies,
    whatever it is at: whoever it waits for has a limit of its own."""
    phase = Phase.REDUCE if sample.pulse.waits else sample.pulse.phase
    return sample.quiet_s < limits.quiet_s(phase)


def _culprits(stuck: Sequence[Sample], everyone: Sequence[Sample]) -> tuple[Hang, ...]:
    """All of `stuck` have been silent for too long, and some of them wait.

    At fault is whom the waits lead to; where they lead nowhere, whoever does not wait.
    """
    by_member = {sample.member: sample for sample in everyone}
    ends, circles = _follow(by_member, [sample.member for sample in stuck if sample.pulse.waits])
    if not ends:
        ends = {sample.member for sample in stuck if not sample.pulse.waits}
    if ends:
        return tuple(_hang(by_member[member], certain=True) for member in sorted(ends))
    return (_hang(_least_far([by_member[m] for m in circles] or stuck), certain=False),)


def _follow(by_member: Mapping[int, Sample], waiting: Sequence[int]) -> tuple[set[int], set[int]]:
    """The members in which chains of waits end, and those in circles of waits."""
    ends: set[int] = set()
    circles: set[int] = set()
    for first in waiting:
        path: list[int] = []
        member = first
        while member in by_member and member not in path:
            path.append(member)
            whom = by_member[member].pulse.waits_for
            if whom is None:
                ends.add(member)
                break
            member = whom
        else:
            circles.update(path[path.index(member) :] if member in path else ())
    return ends, circles


def _least_far(stuck: Sequence[Sample]) -> Sample:
    """The first by step; among those, the one furthest behind its like in operations, since other
    roles have other counts; then the one that has been silent longest."""

    def order(sample: Sample) -> tuple[int, int, float, int]:
        like = (other.pulse.begun for other in stuck if other.role == sample.role)
        behind = sample.pulse.begun - max(like)
        return sample.pulse.step, behind, -sample.quiet_s, sample.member

    return min(stuck, key=order)


def _hang(sample: Sample, certain: bool) -> Hang:
    pulse = sample.pulse
    return Hang(sample.rank, sample.member, pulse.step, pulse.phase, sample.quiet_s, certain)
