"""Who is slow, from the busy time of each step: pure but for the memory of the last steps.

Each step of each rank is compared with the median of the others that do the same work, so that what
slows all of them down is nobody's fault. A rank is named when most of its last steps were slower by
more than noise explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from meshwright.base.pulse import Pulse

WINDOW_STEPS = 16
_LEAST_EXCESS = 0.03  # what is slower by less is not worth a word
_LEAST_EXCESS_S = 0.5e-3  # a step; writing metrics costs one rank as much
_SIGMAS = 5.0  # of the median; a window slides, so one rank is judged again at every step
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_MEDIAN_TO_MEAN = 1.2533  # standard error of a median to that of a mean


@dataclass(frozen=True)
class Straggler:
    """A rank that is busy `busy_ratio` times as long in a step as those of its like."""

    rank: int
    member: int
    busy_ratio: float


@dataclass
class StepLog:
    """The busy time of the last steps of each rank, read off its pulse, and how long steps took."""

    _last: dict[int, tuple[int, Pulse]] = field(default_factory=dict)
    _busy_s: dict[int, dict[int, float]] = field(default_factory=dict)
    _walls_s: list[float] = field(default_factory=list)

    def see(self, rank: int, member: int, pulse: Pulse) -> bool:
        """Take in a pulse; whether it completes a step. Looks that skip steps share their time.

        A rank with a new member or in a new epoch begins anew.
        """
        before = self._last.get(rank)
        if before is not None and before[0] == member and before[1].epoch == pulse.epoch:
            first = before[1]
            if pulse.step <= first.step:
                return False
            self._take(rank, first, pulse)
            self._last[rank] = member, pulse
            return True
        if before is not None and before[0] != member:
            self._busy_s.pop(rank, None)
        if pulse.step:
            self._last[rank] = member, pulse
        return False

    def _take(self, rank: int, first: Pulse, now: Pulse) -> None:
        steps = now.step - first.step
        busy_s = (now.busy_ns - first.busy_ns) / steps / 1e9
        times = self._busy_s.setdefault(rank, {})
        for step in range(max(first.step, now.step - WINDOW_STEPS), now.step):
            times[step] = busy_s
        for step in sorted(times)[:-WINDOW_STEPS]:
            del times[step]
        self._walls_s.append((now.stepped_ns - first.stepped_ns) / steps / 1e9)
        del self._walls_s[: -WINDOW_STEPS * max(1, len(self._busy_s))]

    @property
    def step_times_s(self) -> Sequence[float]:
        """How long the last steps took, of all ranks together, evaluations included."""
        return tuple(self._walls_s)

    def stragglers(self, roles: Mapping[int, str]) -> tuple[Straggler, ...]:
        """The slow ranks among those with the same role, in rank order."""
        found = []
        for rank in sorted(self._busy_s):
            like = [
                other
                for other in self._busy_s
                if other != rank and roles.get(other) == roles.get(rank)
            ]
            ratio = excess([self._busy_s[rank], *(self._busy_s[other] for other in like)])
            if ratio is not None:
                found.append(Straggler(rank, self._last[rank][0], ratio))
        return tuple(found)


def excess(busy_s: Sequence[Mapping[int, float]]) -> float | None:
    """How much slower the first is than the median of the rest, as a ratio; None if it is not.

    Each mapping holds seconds by step. Steps that one of them lacks do not count, and there must be
    `WINDOW_STEPS` that do. With the median of ratios, single slow steps do not count either.
    """
    mine, *others = busy_s
    steps = [step for step in mine if all(step in other for other in others)]
    if not others or len(steps) < WINDOW_STEPS:
        return None
    usual_s = {step: median(other[step] for other in others) for step in steps}
    if min(usual_s.values()) <= 0:
        return None
    ratios = [mine[step] / usual_s[step] for step in steps]
    ratio = median(ratios)
    spread = _MAD_TO_SIGMA * median(abs(value - ratio) for value in ratios)
    error = _MEDIAN_TO_MEAN * spread / len(ratios) ** 0.5
    least = max(_LEAST_EXCESS, _LEAST_EXCESS_S / median(usual_s.values()), _SIGMAS * error)
    return ratio if ratio - 1 > least else None
