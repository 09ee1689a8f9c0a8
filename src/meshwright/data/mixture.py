"""Mixtures of sources: which source sample k of a run is of, and the how-manieth of it.

Both follow from k in closed form, so that any reader starts anywhere at once. Shares are exact:
after every `PRECISION` samples of a stage each source has had just its weight of them, and at the
end of every block of `BLOCK` samples none is off by more than the depth of the tree below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import ConfigError
from meshwright.data.sampler import derived_seed, sample_indices

Longs = npt.NDArray[np.int64]

PRECISION = 1 << 20  # weights are rounded to multiples of one in so many
BLOCK = 64  # samples that are put in a random order, so that no rank sees one source alone


@dataclass(frozen=True)
class Stage:
    """Weights that hold from sample `start` on; they need not add up to one."""

    start: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Draws:
    """Of each of m samples its source and which draw of that source it is, both int64 [m]."""

    source: Longs
    number: Longs


@dataclass(frozen=True)
class Mixture:
    """Stages in order of their start, the first at 0, all over the same number of sources."""

    stages: tuple[Stage, ...]
    seed: int

    def __post_init__(self) -> None:
        """Raises ConfigError on `data.mixture`."""
        starts = [stage.start for stage in self.stages]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise _wrong(starts, "stages begin at sample 0 and then each after the one before it")
        sizes = {len(stage.weights) for stage in self.stages}
        if len(sizes) != 1 or 0 in sizes:
            raise _wrong(sorted(sizes), "every stage has one weight for each source")
        for stage in self.stages:
            least = sum(stage.weights) / PRECISION
            if not all(0 <= weight < np.inf for weight in stage.weights) or not sum(stage.weights):
                raise _wrong(stage.weights, "weights are >= 0 and one of them is above it")
            if any(0 < weight < least for weight in stage.weights):
                raise _wrong(stage.weights, f"a share below 1/{PRECISION} is none; use 0 or raise")

    @property
    def sources(self) -> int:
        """How many sources are mixed."""
        return len(self.stages[0].weights)

    def draws(self, ks: Longs) -> Draws:
        """Where samples number `ks` [m] >= 0 come from. Two samples never share a draw, and the
        first n draws of a source are all that any prefix of the run takes of it."""
        starts = np.array([stage.start for stage in self.stages])
        stage_of = np.searchsorted(starts, ks, side="right") - 1
        source, number = np.empty_like(ks), np.empty_like(ks)
        for index in np.unique(stage_of):
            mine = stage_of == index
            slots = self._slots(ks[mine] - starts[index], int(index))
            found, count = _locate(self._tables[index], slots)
            source[mine], number[mine] = found, count + self._before[index][found]
        return Draws(source, number)

    def taken(self, k: int) -> Longs:
        """How many of the first `k` samples are of each source where a block ends there, and a few
        more or less elsewhere; int64 [sources]."""
        index = max(i for i, stage in enumerate(self.stages) if stage.start <= k)
        return self._before[index] + self._counts(index, k - self.stages[index].start)

    def drawn(self, k: int) -> Longs:
        """How many of the first `k` samples are of each source, exactly; int64 [sources]."""
        index = max(i for i, stage in enumerate(self.stages) if stage.start <= k)
        start = self.stages[index].start
        whole = (k - start) // BLOCK * BLOCK
        rest = self.draws(np.arange(start + whole, k)).source
        counts = self._before[index] + self._counts(index, whole)
        return counts + np.bincount(rest, minlength=self.sources)

    def _counts(self, stage: int, n: int) -> Longs:
        return _counts(self._tables[stage], n)[: self.sources]

    def _slots(self, offsets: Longs, stage: int) -> Longs:
        """`offsets` into a stage, each block of them in an order of its own; one that the next
        stage cuts short stays as it is, for its slots must all be of this stage."""
        if self.sources == 1:
            return offsets
        last = stage + 1 == len(self.stages)
        length = 2**62 if last else self.stages[stage + 1].start - self.stages[stage].start
        whole = offsets < length // BLOCK * BLOCK
        shuffled = offsets - offsets % BLOCK + sample_indices(self._seeds[stage], offsets, BLOCK)
        return np.where(whole, shuffled, offsets)

    @cached_property
    def _tables(self) -> tuple[Longs, ...]:
        return tuple(_tree(_integers(stage.weights)) for stage in self.stages)

    @cached_property
    def _seeds(self) -> tuple[int, ...]:
        return tuple(derived_seed(self.seed, stage) for stage in range(len(self.stages)))

    @cached_property
    def _before(self) -> tuple[Longs, ...]:
        """Draws of each source before each stage."""
        total = np.zeros(self.sources, dtype=np.int64)
        found = [total]
        for index in range(len(self.stages) - 1):
            length = self.stages[index + 1].start - self.stages[index].start
            total = total + self._counts(index, length)
            found.append(total)
        return tuple(found)


def even(sources: int, seed: int) -> Mixture:
    """The same share for each source for ever."""
    return Mixture((Stage(0, (1.0,) * sources),), seed)


def _integers(weights: Sequence[float]) -> Longs:
    """`weights` as integers that sum to `PRECISION`, by largest remainder."""
    exact = np.array(weights) / sum(weights) * PRECISION
    whole = np.floor(exact).astype(np.int64)
    missing = PRECISION - int(whole.sum())
    largest = np.argsort(-(exact - whole), kind="stable")[:missing]
    whole[largest] += 1
    return whole


def _tree(weights: Longs) -> Longs:
    """A binary tree over the sources, as sums in a heap: node i has children 2i and 2i + 1, leaf s
    stands at `size + s`, size a power of two; int64 [2 size]."""
    size = 1 << max(0, len(weights) - 1).bit_length()
    sums = np.zeros(2 * size, dtype=np.int64)
    sums[size : size + len(weights)] = weights
    for node in range(size - 1, 0, -1):
        sums[node] = sums[2 * node] + sums[2 * node + 1]
    return sums


def _to_left(left: Longs, whole: Longs, n: Longs) -> Longs:
    """How many of the first `n` visits of a node of weight `whole` go to its left child: the
    nearest integer to n left / whole, in steps of whole periods so that nothing overflows."""
    periods, rest = np.divmod(n, whole)
    return periods * left + (2 * rest * left + whole) // (2 * whole)


def _locate(sums: Longs, slots: Longs) -> tuple[Longs, Longs]:
    """(source, number among its own) of visits number `slots` [m] of the root."""
    size = len(sums) // 2
    node, visit = np.ones_like(slots), slots.copy()
    for _ in range(size.bit_length() - 1):
        whole, left = sums[node], sums[2 * node]
        before = _to_left(left, whole, visit)
        goes_left = _to_left(left, whole, visit + 1) > before
        visit = np.where(goes_left, before, visit - before)
        node = 2 * node + ~goes_left
    return node - size, visit


def _counts(sums: Longs, n: int) -> Longs:
    """Visits of each leaf among the first `n` of the root, int64 [size]."""
    level = np.array([n])
    size = len(sums) // 2
    width = 1
    while width < size:
        nodes = np.arange(width, 2 * width)
        whole, left = np.maximum(sums[nodes], 1), sums[2 * nodes]
        to_left = _to_left(left, whole, level)
        level = np.stack([to_left, level - to_left], axis=1).ravel()
        width *= 2
    return level


def _wrong(value: object, fix: str) -> ConfigError:
    return ConfigError("data.mixture", value, fix)
