"""Which layers a pipeline stage holds: by cost, so that no rank waits for the slowest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import inf

from meshwright.models.spec import ModelSpec
from meshwright.plan.layout import Layout
from meshwright.plan.schedule import rank_of

# A look-up has no product. It reads and writes a row, its backward reads a gradient and adds it to
# a row: five moves of 2-byte channels, in each byte of which an accelerator does some 200 FLOPs
# (H100 in bf16: 990 TFLOP/s, 3.35 TB/s, 70 % reached).
LOOKUP_FLOPS_PER_CHANNEL = 5 * 2 * 200.0
SAME = 1e-9  # relative: sums of floats in another order


@dataclass(frozen=True)
class StageCosts:
    """Cost of each layer, of what the first stage does besides (embedding), and of what the last
    does (final norm, head, loss). Seconds or FLOPs: only ratios count."""

    layers: tuple[float, ...]
    first_extra: float
    last_extra: float


def predicted_costs(spec: ModelSpec, seq_len: int) -> StageCosts:
    """FLOPs of one token's forward and backward, in a sequence of `seq_len` tokens.

    The embedding counts by the bytes that it moves: 1 % of a layer where hidden is 2048.
    """
    return StageCosts(
        layers=tuple(spec.layer_flops(layer, seq_len) for layer in range(spec.layers)),
        first_extra=LOOKUP_FLOPS_PER_CHANNEL * spec.hidden,
        last_extra=spec.head_flops,
    )


def stage_layers(
    spec: ModelSpec, layout: Layout, seq_len: int, costs: StageCosts | None = None
) -> list[range]:
    """Layers of each virtual stage, in order.

    As `layout.stages` says; if that is empty, by `costs` (measured ones, say), or predicted ones.
    With one chunk a rank the slowest stage is as fast as it can be; with several, the slowest rank
    is made fast first, then the slowest stage.
    """
    if layout.stages:
        return _ranges([0, *accumulate(layout.stages)])
    costs = costs or predicted_costs(spec, seq_len)
    extras = costs.first_extra, costs.last_extra
    even_stages = assign_layers(list(costs.layers), *extras, layout.virtual_stages)
    if layout.chunks == 1:
        return even_stages
    loads = _Loads(costs, layout)
    starts = [[0, *(stage.stop for stage in even_stages)], loads.even_cuts()]
    return _ranges(min((_improve(cuts, loads) for cuts in starts), key=loads.slowness))


def balance(ranges: Sequence[range], costs: StageCosts, layout: Layout) -> float:
    """Mean / max cost of a rank over its stages, `ranges` being those of every stage; 1 is even."""
    loads = _Loads(costs, layout)
    ranks = loads.of_ranks(loads.of_stages([0, *(stage.stop for stage in ranges)]))
    return sum(ranks) / len(ranks) / max(ranks)


def assign_layers(
    costs: list[float], first_extra: float, last_extra: float, stages: int
) -> list[range]:
    """Contiguous layers of each stage, such that the dearest stage is as cheap as possible, and
    among all such choices the sum of squares is smallest. Exact, by dynamic programming.

    The first stage costs `first_extra` more, the last `last_extra`; only these two may be left
    without layers where there are as many layers as stages.
    """
    cuts = _Cuts(costs, first_extra, last_extra, stages)
    bound = cuts.best(inf, squares=False)[0]
    return _ranges(cuts.best(bound * (1 + SAME), squares=True)[1])


class _Cuts:
    """Ways to cut a row of layers into stages."""

    def __init__(self, costs: list[float], first: float, last: float, stages: int) -> None:
        self.layers, self.stages = len(costs), stages
        self.before = [0.0, *accumulate(costs)]
        self.extra = [0.0] * stages
        self.extra[0] += first
        self.extra[-1] += last

    def best(self, bound: float, squares: bool) -> tuple[float, list[int]]:
        """The least largest cost of a stage, or sum of squares, with no stage above `bound`; and
        the cuts, from 0 to the number of layers."""
        value = [0.0] + [inf] * self.layers
        came_from = []
        for stage in range(self.stages):
            ends = [self._end(value, stage, end, bound, squares) for end in range(self.layers + 1)]
            value = [cost for cost, _ in ends]
            came_from.append([begin for _, begin in ends])
        cuts = [self.layers]
        for begins in reversed(came_from):
            cuts.append(begins[cuts[-1]])
        return value[self.layers], cuts[::-1]

    def _end(
        self, value: list[float], stage: int, end: int, bound: float, squares: bool
    ) -> tuple[float, int]:
        """Least value where `stage` ends before layer `end`, and where it begins; `value` has the
        same for the stage before."""
        best, chosen = inf, 0
        inner = 0 < stage < self.stages - 1
        for begin in range(end - (inner and self.layers >= self.stages), -1, -1):
            cost = self.extra[stage] + self.before[end] - self.before[begin]
            if cost > bound or (not squares and cost >= best):
                break  # an earlier begin costs more
            whole = value[begin] + cost**2 if squares else max(value[begin], cost)
            if whole < best:
                best, chosen = whole, begin
        return best, chosen


class _Loads:
    """What stages and ranks carry where layers are cut at given places."""

    def __init__(self, costs: StageCosts, layout: Layout) -> None:
        self.costs, self.pp = costs, layout.pp
        self.before = [0.0, *accumulate(costs.layers)]
        stages = range(layout.virtual_stages)
        self.ranks = [rank_of(stage, layout.schedule, layout.pp) for stage in stages]

    def of_stages(self, cuts: Sequence[int]) -> list[float]:
        """Cost of each stage, between one cut and the next."""
        stages = [self.before[end] - self.before[begin] for begin, end in pairwise(cuts)]
        stages[0] += self.costs.first_extra
        stages[-1] += self.costs.last_extra
        return stages

    def of_ranks(self, stages: Sequence[float]) -> list[float]:
        """Cost of each rank."""
        ranks = [0.0] * self.pp
        for rank, cost in zip(self.ranks, stages, strict=True):
            ranks[rank] += cost
        return ranks

    def even_cuts(self) -> list[int]:
        """Cuts that give each rank an equal share, in equal parts to its stages, rounded."""
        extras = self.of_ranks(self.of_stages([0] * (len(self.ranks) + 1)))
        share = (sum(extras) + self.before[-1]) / self.pp
        room = list(accumulate(max(0.0, share - extras[rank]) for rank in self.ranks))
        cuts = [0]
        for until in room[:-1]:
            target = until / (room[-1] or 1.0) * self.before[-1]
            near = bisect_left(self.before, target)
            down = near > 0 and target - self.before[near - 1] < self.before[near] - target
            cuts.append(near - down)
        return [*cuts, len(self.costs.layers)]

    def slowness(self, cuts: Sequence[int]) -> tuple[float, ...]:
        """What a better choice has less of: inner stages without a layer, the cost of the dearest
        rank, that of the dearest stage, unevenness. Rounded, so that equal compares as equal."""
        stages = self.of_stages(cuts)
        ranks = self.of_ranks(stages)
        total = sum(stages) or 1.0
        enough = len(self.costs.layers) >= len(stages)
        empty = enough and sum(begin == end for begin, end in pairwise(cuts[1:-1]))
        squares = sum(cost * cost for cost in chain(ranks, stages)) / total**2
        return empty, round(max(ranks) / total, 9), round(max(stages) / total, 9), round(squares, 9)


def _improve(cuts: list[int], loads: _Loads) -> list[int]:
    """Take a layer from one stage and give it to another, the cuts between them moving along, as
    long as that is better."""
    better: list[int] | None = cuts
    while better is not None:
        cuts, least = better, loads.slowness(better)
        better = next((near for near in _neighbours(cuts) if loads.slowness(near) < least), None)
    return cuts


def _neighbours(cuts: list[int]) -> Iterator[list[int]]:
    for first in range(1, len(cuts) - 1):
        for after in range(first + 1, len(cuts)):
            head, between, tail = cuts[:first], cuts[first:after], cuts[after:]
            if between[-1] < tail[0]:
                yield [*head, *(cut + 1 for cut in between), *tail]
            if head[-1] < between[0]:
                yield [*head, *(cut - 1 for cut in between), *tail]


def _ranges(cuts: Sequence[int]) -> list[range]:
    return [range(begin, end) for begin, end in pairwise(cuts)]
