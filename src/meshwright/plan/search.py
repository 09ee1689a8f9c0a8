"""Exhaustive search: every legal layout is priced, memory first, then time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from meshwright.plan.cost.candidates import Bools, Candidates, Floats
from meshwright.plan.cost.memory import Memory, memory
from meshwright.plan.cost.oom import oom_probability
from meshwright.plan.cost.step import step_time
from meshwright.plan.search_front import front
from meshwright.plan.search_question import Question
from meshwright.plan.search_space import Space

KEPT = 256  # the fastest that are kept, besides those that nothing beats in time and risk
SLACK = 1.25  # nobody wants what takes a quarter longer than the fastest
FIRST_BATCH, BATCH = 4_000, 40_000  # candidates priced at once: they fit the caches of a core


@dataclass(frozen=True)
class Priced:
    """Candidates with what decides between them: seconds of a step, probability of running out of
    memory, bytes of the heaviest chip."""

    candidates: Candidates
    step_s: Floats
    risk: Floats
    memory_bytes: Floats

    def __len__(self) -> int:
        return len(self.step_s)

    @classmethod
    def none(cls) -> Priced:
        """No candidates."""
        return cls(Candidates.of(0), *(np.zeros(0) for _ in range(3)))

    def take(self, which: object) -> Priced:
        """Those that `which`, indices or a mask, selects."""
        index = np.asarray(which)
        return Priced(
            self.candidates.take(index), self.step_s[index], self.risk[index],
            self.memory_bytes[index],
        )  # fmt: skip

    @classmethod
    def join(cls, parts: Iterable[Priced]) -> Priced:
        """All of `parts`."""
        every = list(parts)
        return cls(
            Candidates.join(part.candidates for part in every),
            np.concatenate([part.step_s for part in every]),
            np.concatenate([part.risk for part in every]),
            np.concatenate([part.memory_bytes for part in every]),
        )


@dataclass(frozen=True)
class Found:
    """What a search found: `best` from the fastest; `legal` layouts in all; `fitting` of those that
    were priced have no more than the risk allowed; `leanest` the one that needs least memory, None
    if none is legal; `refused` choices of axes by the rule that stopped them first."""

    question: Question
    best: Priced
    legal: int
    fitting: int
    leanest: Priced | None
    refused: Counter[str]


def search(question: Question, slack: float = SLACK) -> Found:
    """Every legal layout of `question` that fits and takes up to `slack` times the fastest.

    First each way to share out state, experts and batch is priced where it keeps least: what does
    not even fit then is out. What is left has a bound on its time (`_bounds`). It is priced in the
    order of these, as long as a bound is below `slack` times what was found: so nothing is missed.
    """
    space = Space(question)
    if not space.axes:
        return Found(question, Priced.none(), 0, 0, None, space.refused)
    rows = space.rows()
    leanest, fits = _leanest(question, rows)
    bounds = np.where(fits, np.inf, np.nan)
    bounds[fits] = _bounds(question, rows.take(fits))
    order = np.argsort(bounds)[: int(fits.sum())]
    best, fitting, start = Priced.none(), 0, 0
    per_row = len(space) / len(rows)
    batch = max(1, int(FIRST_BATCH / per_row))
    while start < len(order):
        limit = slack * best.step_s[0] if len(best) else np.inf
        some = order[start : start + batch]
        some = some[bounds[some] <= limit]
        if not len(some):
            break
        priced, count = _fastest(question, space.expand(some), slack)
        best, fitting = _merge(best, priced, slack), fitting + count
        start, batch = start + batch, max(1, int(BATCH / per_row))
    return Found(question, best, len(space), fitting, leanest, space.refused)


def feasible(question: Question) -> bool:
    """Whether any layout fits."""
    space = Space(question)
    return bool(space.axes) and bool(np.any(_leanest(question, space.rows())[1]))


def _leanest(question: Question, rows: Candidates) -> tuple[Priced, Bools]:
    """The row that needs least memory, and which rows fit."""
    used = memory(question.work, rows)
    risk = chances(question, used)
    lowest = [int(np.argmin(used.total_bytes))]
    one = rows.take(lowest)
    step = step_time(question.work, question.cluster, one, question.constants).step_s
    return Priced(one, step, risk[lowest], used.total_bytes[lowest]), risk <= question.risk


def _bounds(question: Question, rows: Candidates) -> Floats:
    """Seconds that no schedule and no recomputation of a row beats: nothing is made again, the
    pipeline has no bubble, gradients and weights move unseen."""
    plain = replace(rows, recompute=np.zeros_like(rows.recompute))
    time = step_time(question.work, question.cluster, plain, question.constants)
    return time.step_s - time.parts["bubble"] - time.parts["dp"] - time.parts["overhead"]


def chances(question: Question, used: Memory) -> Floats:
    """Probability of running out of memory."""
    capacity = question.cluster.chip.memory_bytes
    return oom_probability(used, question.framework, capacity, question.imbalance)


def _fastest(question: Question, chunk: Candidates, slack: float) -> tuple[Priced, int]:
    """Of those of `chunk` that fit the fastest, and those that nothing beats in both time and risk;
    and how many fit."""
    used = memory(question.work, chunk)
    risk = chances(question, used)
    fits = risk <= question.risk
    chunk = chunk.take(fits)
    step = step_time(question.work, question.cluster, chunk, question.constants).step_s
    priced = Priced(chunk, step, risk[fits], used.total_bytes[fits])
    return _merge(Priced.none(), priced, slack), len(chunk)


def _merge(first: Priced, second: Priced, slack: float) -> Priced:
    """The fastest of both, and those that nothing beats in both time and risk, in order."""
    both = Priced.join([first, second])
    order = np.argsort(both.step_s, kind="stable")
    both = both.take(order[both.step_s[order] <= slack * np.min(both.step_s, initial=np.inf)])
    return both.take(np.union1d(np.arange(min(KEPT, len(both))), front(both.step_s, both.risk)))
