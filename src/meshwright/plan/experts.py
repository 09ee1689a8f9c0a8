"""Which rank hosts which expert, and when to change that. Pure policy: no weights move here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

PATIENCE_STEPS = 10  # an imbalance must last so long before experts are moved
REST_STEPS = 50  # after a move the loads settle before they are looked at again
_WORTH = 0.01  # a gain below this share is not worth moving weights


@dataclass(frozen=True)
class Placement:
    """The logical expert of each physical place; place p lives on rank p // per_rank of `ep` ranks.

    There are as many places as experts and replicas together. A replicated expert has several
    places. Raises ValueError unless every rank gets equally many places and every expert one.
    """

    experts: tuple[int, ...]
    ep: int

    def __post_init__(self) -> None:
        if len(self.experts) % self.ep:
            raise ValueError(f"{len(self.experts)} places do not divide over ep = {self.ep} ranks")
        if set(self.experts) != set(range(self.n_experts)):
            raise ValueError(f"an expert has no place in {self.experts}")

    @property
    def n_experts(self) -> int:
        """Logical experts."""
        return max(self.experts) + 1

    @property
    def per_rank(self) -> int:
        """Places of one rank."""
        return len(self.experts) // self.ep

    def on(self, rank: int) -> tuple[int, ...]:
        """The experts of the places of `rank`, in order."""
        return self.experts[rank * self.per_rank : (rank + 1) * self.per_rank]

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """For each expert its places, ascending; the first one answers for it."""
        found: list[list[int]] = [[] for _ in range(self.n_experts)]
        for place, expert in enumerate(self.experts):
            found[expert].append(place)
        return tuple(map(tuple, found))

    @property
    def replicated(self) -> tuple[int, ...]:
        """Experts that have more than one place, ascending."""
        return tuple(expert for expert, places in enumerate(self.places) if len(places) > 1)


def initial(n_experts: int, replicas: int, ep: int) -> Placement:
    """Experts in order, then the first `replicas` of them once more.

    Raises ValueError unless `ep` divides n_experts + replicas.
    """
    extra = (expert % n_experts for expert in range(replicas))
    return Placement((*range(n_experts), *extra), ep)


def imbalance(loads: Sequence[float], placement: Placement) -> float:
    """Tokens of the fullest rank over the mean of all ranks; `loads` are tokens by expert."""
    ranks = _rank_loads(_bins(placement), _place_loads(loads, placement))
    mean = sum(ranks) / len(ranks)
    return max(ranks) / mean if mean else 1.0


def rebalance(loads: Sequence[float], placement: Placement) -> Placement | None:
    """A placement that evens out `loads`, or None where none found is worth the move.

    `loads` are one layer's tokens by expert, averaged over some steps. Tried are swaps from the
    placement in use, which move little, and a fresh start: spare places go to the experts with the
    most tokens a place, experts to the emptiest rank, the largest first (LPT; Graham, SIAM J. Appl.
    Math. 17(2), 1969), then swaps. The result is never worse than `placement`.
    """
    swapped = _swapped(loads, placement)
    fresh = _swapped(loads, _fresh(loads, placement))
    close = imbalance(loads, swapped) <= imbalance(loads, fresh) * (1 + _WORTH)
    best = swapped if close else fresh
    worth = imbalance(loads, best) < imbalance(loads, placement) * (1 - _WORTH)
    return best if worth else None


@dataclass(frozen=True)
class Trigger:
    """When to re-place the experts of one layer; one new state a step, the same on every rank.

    It is `due` once the imbalance has stayed above the bound for PATIENCE_STEPS steps in a row;
    then it rests for REST_STEPS.
    """

    streak: int = 0
    rest: int = 0
    _sums: tuple[float, ...] = field(default=(), repr=False)

    @property
    def due(self) -> bool:
        """Whether to call `rebalance(mean_loads, placement)` after this step."""
        return self.streak >= PATIENCE_STEPS

    @property
    def mean_loads(self) -> tuple[float, ...]:
        """Tokens by expert, averaged over the steps of the imbalance."""
        return tuple(total / max(self.streak, 1) for total in self._sums)

    def as_numbers(self) -> list[float]:
        """All there is to it, for a checkpoint."""
        return [float(self.streak), float(self.rest), *self._sums]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Trigger:
        """The inverse of `as_numbers`."""
        streak, rest, *sums = numbers
        return cls(int(streak), int(rest), tuple(sums))

    def after(self, loads: Sequence[float], placement: Placement, above: float) -> Trigger:
        """The state after a step with `loads` tokens by expert; `above` is the bound, 0: never."""
        if self.due:
            return Trigger(rest=REST_STEPS - 1)
        if self.rest:
            return Trigger(rest=self.rest - 1)
        if not above or imbalance(loads, placement) <= above:
            return Trigger()
        before = self._sums or (0.0,) * len(loads)
        sums = tuple(a + b for a, b in zip(before, loads, strict=True))
        return Trigger(self.streak + 1, 0, sums)


Bins = list[list[int]]  # experts by rank


def _bins(placement: Placement) -> Bins:
    return [list(placement.on(rank)) for rank in range(placement.ep)]


def _placement(bins: Bins) -> Placement:
    return Placement(tuple(expert for held in bins for expert in held), len(bins))


def _place_loads(loads: Sequence[float], placement: Placement) -> list[float]:
    """Tokens of one place of each expert: its tokens are spread over its places."""
    return [load / len(places) for load, places in zip(loads, placement.places, strict=True)]


def _rank_loads(bins: Bins, place_loads: Sequence[float]) -> list[float]:
    return [sum(place_loads[expert] for expert in held) for held in bins]


def _fresh(loads: Sequence[float], placement: Placement) -> Placement:
    """Replicas for the fullest experts, then the largest place to the emptiest rank."""
    copies = [1] * len(loads)
    for _ in range(len(placement.experts) - len(loads)):
        fullest = max(
            range(len(loads)), key=lambda e: (copies[e] < placement.ep, loads[e] / copies[e])
        )
        copies[fullest] += 1
    places = [expert for expert, count in enumerate(copies) for _ in range(count)]
    weight = [load / count for load, count in zip(loads, copies, strict=True)]
    bins: Bins = [[] for _ in range(placement.ep)]
    for expert in sorted(places, key=lambda e: (-weight[e], e)):
        room = (held for held in bins if len(held) < placement.per_rank)
        # A second copy on the same rank relieves nobody.
        min(room, key=lambda h: (expert in h, sum(weight[e] for e in h))).append(expert)
    return _placement([sorted(held) for held in bins])


def _swapped(loads: Sequence[float], placement: Placement) -> Placement:
    """Swap a place of the fullest rank with one of another as long as that lowers the higher of
    the two; one swap a place at most."""
    bins, weight = _bins(placement), _place_loads(loads, placement)
    for _ in placement.experts:
        ranks = _rank_loads(bins, weight)
        fullest = max(range(len(bins)), key=ranks.__getitem__)
        swaps = (
            (max(ranks[fullest] - gain, ranks[other] + gain), i, other, j)
            for i, mine in enumerate(bins[fullest])
            for other, held in enumerate(bins)
            for j, theirs in enumerate(held)
            if other != fullest and mine not in held and theirs not in bins[fullest]
            if (gain := weight[mine] - weight[theirs]) > 0
        )
        after, i, other, j = min(swaps, default=(ranks[fullest], 0, 0, 0))
        if after >= ranks[fullest]:
            break
        bins[fullest][i], bins[other][j] = bins[other][j], bins[fullest][i]
    return _placement(bins)
