"""Every legal layout of a model on so many chips, as columns of numbers.

Legal is what `plan/combinations.py` and `plan/expert_rules.py` accept, and what the framework can
do (`search_space.toml`). One thing is left out on purpose: a rank that would hold less than
`SHORTEST_SLICE` tokens of a sequence.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from math import lcm
from typing import Any

import numpy as np

from meshwright.plan.cost.candidates import (
    INTERLEAVED,
    RECOMPUTES,
    SCHEDULES,
    Bools,
    Candidates,
    Ints,
)
from meshwright.plan.layout import V_SCHEDULES
from meshwright.plan.search_question import Question

SHORTEST_SLICE = 64  # tokens of a sequence on one rank
MOST_CHUNKS = 16  # stages of a rank under interleaving

Column = tuple[int, ...]


@dataclass(frozen=True)
class Abilities:
    """What a framework can run; fields as in `search_space.toml`."""

    zero: tuple[int, ...]
    pipelined_zero: int
    schedules: tuple[str, ...]
    recompute: tuple[str, ...]
    padded_vocab: bool
    ring: bool
    ulysses: bool
    pipelined_cp: bool
    sp: bool
    etp: bool
    tp: bool
    pp: bool


def abilities(framework: str) -> Abilities:
    """Those of `framework`; of `any` where the file does not name it."""
    entry = _entry(framework if framework in _table() else "any")
    columns = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    whole: dict[str, Any] = {**entry, **columns}
    return Abilities(**whole)


def _entry(name: str) -> dict[str, Any]:
    own = dict(_table()[name])
    return {**_entry(own.pop("like")), **own} if "like" in own else own


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = files("meshwright.plan").joinpath("search_space.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@dataclass(frozen=True)
class Axes:
    """One choice of tp, pp, cp, dp and micro-batch: `rows` are its ways to share out state and
    experts, each as it keeps least (1F1B, deepest recomputation); `inner` the (schedule, vpp,
    recompute) that go with every row."""

    rows: Candidates
    inner: tuple[Column, ...]

    def __len__(self) -> int:
        return len(self.rows) * len(self.inner)

    def expand(self, which: Any) -> Candidates:
        """Every row that `which` selects with every inner choice."""
        rows = self.rows.take(which)
        index = np.repeat(np.arange(len(rows)), len(self.inner))
        schedule, vpp, again = np.tile(np.array(self.inner, np.int64).T, len(rows))
        return replace(rows.take(index), schedule=schedule, vpp=vpp, recompute=again)


class Space:
    """All legal layouts for a question. `refused` counts choices of axes by what stops them."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.can = abilities(question.framework.name)
        self.refused: Counter[str] = Counter()
        self.axes = tuple(self._axes())
        self._starts = np.cumsum([0, *(len(axes.rows) for axes in self.axes)])

    def __len__(self) -> int:
        return sum(map(len, self.axes))

    def rows(self) -> Candidates:
        """The rows of all axes, one after the other."""
        return Candidates.join(axes.rows for axes in self.axes)

    def expand(self, rows: Ints) -> Candidates:
        """All layouts of these rows, numbered as in `rows()`."""
        which = np.searchsorted(self._starts, rows, side="right") - 1
        found = [Candidates.of(0)]
        for number in np.unique(which):
            found.append(self.axes[number].expand(rows[which == number] - self._starts[number]))
        return Candidates.join(found)

    def _axes(self) -> Iterator[Axes]:
        world, can = self.question.cluster.chips, self.can
        for tp in divisors(world) if can.tp else [1]:
            if reason := tensor_problem(self.question, tp):
                self.refused[reason] += 1
                continue
            for pp in divisors(world // tp) if can.pp else [1]:
                if pp > self.question.spec.layers:
                    self.refused[f"pp is more than the {self.question.spec.layers} layers"] += 1
                    continue
                for cp in divisors(world // (tp * pp)):
                    yield from self._with_axes(tp, pp, cp, world // (tp * pp * cp))

    def _with_axes(self, tp: int, pp: int, cp: int, dp: int) -> Iterator[Axes]:
        question = self.question
        batch, seq_len, experts = question.global_batch, question.seq_len, question.spec.n_experts
        if batch % dp:
            self.refused[f"dp does not divide the global batch of {batch}"] += 1
            return
        ways = self._context_ways(tp, cp, pp)
        if not ways:
            reason = f"cp cuts {seq_len} tokens too small, does not divide heads, or has a pipeline"
            self.refused[reason] += 1
            return
        table = cross(self._data(dp, cp, pp), self._experts(tp), ways)
        replicate, shard, zero, ep, etp, ulysses, sp = table
        rows = Candidates.of(
            len(zero), tp=tp, pp=pp, cp=cp, dp_replicate=replicate, dp_shard=shard, zero=zero,
            ep=ep, etp=etp, ulysses=ulysses, sp=sp, recompute=self._recomputes[-1],
        )  # fmt: skip
        if experts:
            rows = rows.take(_has_places(rows))
        if not len(rows):
            self.refused[f"ep does not share out {experts} experts"] += 1
        for micro in divisors(batch // dp):
            if micro <= question.largest_micro_batch and len(rows):
                sized = replace(rows, micro_batch=np.full(len(rows), micro))
                yield Axes(sized, tuple(self._inner(pp, batch // dp // micro)))

    def _inner(self, pp: int, micro_batches: int) -> Iterator[Column]:
        """Interleaving wants whole rounds of micro-batches."""
        for schedule, vpp in self._pipelines(pp):
            if schedule != INTERLEAVED or micro_batches % pp == 0:
                for again in self._recomputes:
                    yield schedule, vpp, again

    def _context_ways(self, tp: int, cp: int, pp: int) -> list[Column]:
        """(ulysses, sp) that cut the sequence evenly. Sequence parallelism moves as many bytes and
        keeps fewer, so it is off only where it does not divide the sequence."""
        question, can = self.question, self.can
        methods = [0] if cp == 1 else [0] * can.ring + [1] * can.ulysses
        if min(cp, pp) > 1 and not can.pipelined_cp:
            return []
        found: list[Column] = []
        for ulysses in methods:
            if ulysses and (question.spec.heads // tp) % cp:
                continue
            for sp in (1, 0) if can.sp else (0,):
                ring = 2 if cp > 1 and not ulysses else 1
                parts = tp if sp and tp > 1 else 1
                whole = question.seq_len % (cp * lcm(ring, parts)) == 0
                slices = cp * parts
                if whole and (slices == 1 or question.seq_len // slices >= SHORTEST_SLICE):
                    found.append((ulysses, sp))
                    break
        return found

    def _pipelines(self, pp: int) -> list[Column]:
        """(schedule, vpp). Interleaving is tried where it makes no rank hold more layers than it
        would without; Megatron counts embedding and head as two more layers."""
        if pp == 1:
            return [(SCHEDULES.index("1f1b"), 1)]
        found: list[Column] = []
        layers = self.question.spec.layers
        for name in self.can.schedules:
            code = SCHEDULES.index(name)
            if name == "interleaved":
                found += [(code, vpp) for vpp in _chunkings(layers, pp, self._counts_ends)]
            elif name not in V_SCHEDULES or 2 * pp <= layers:
                found.append((code, 1))
        return found

    @property
    def _counts_ends(self) -> bool:
        return self.question.framework.even_stages

    def _data(self, dp: int, cp: int, pp: int) -> list[Column]:
        """(dp_replicate, dp_shard, zero). Below ZeRO-3 state is shared over all replicas: groups of
        them would move as much and keep more."""
        allowed = [z for z in self.can.zero if pp == 1 or z <= self.can.pipelined_zero]
        found: list[Column] = [(dp, 1, 0)] if 0 in allowed or dp * cp == 1 else []
        if dp * cp > 1:
            found += [(1, dp, zero) for zero in allowed if zero]
        if 3 in allowed:
            found += [(dp // n, n, 3) for n in divisors(dp)[:-1] if n * cp > 1]
        return found or [(dp, 1, 0)]

    def _experts(self, tp: int) -> list[Column]:
        """(ep, etp)."""
        spec = self.question.spec
        if not spec.n_experts:
            return [(1, 1)]
        widths = {1, tp} if self.can.etp and spec.expert_ffn_hidden % tp == 0 else {1}
        return [(ep, etp) for etp in sorted(widths) for ep in divisors(spec.n_experts)]

    @cached_property
    def _recomputes(self) -> tuple[int, ...]:
        return tuple(RECOMPUTES.index(name) for name in self.can.recompute)


def tensor_problem(question: Question, tp: int) -> str:
    """Why `tp` does not go with the shape of the model; empty if it does."""
    spec = question.spec
    sizes = {"heads": spec.heads}
    if not abilities(question.framework.name).padded_vocab:
        sizes["vocab"] = spec.vocab
    if not spec.latent_attention:
        sizes["kv_heads"] = spec.kv_heads
    if not spec.n_experts or spec.first_dense_layers:
        sizes["ffn_hidden"] = spec.ffn_hidden
    if spec.n_shared_experts:
        sizes["shared experts' width"] = spec.n_shared_experts * spec.expert_ffn_hidden
    wrong = next((name for name, size in sizes.items() if size % tp), "")
    return f"tp does not divide {wrong} ({sizes[wrong]})" if wrong else ""


def _has_places(c: Candidates) -> Bools:
    """Whether experts can live there: `_check_places` and `_check_widths` of expert_rules.py."""
    lanes = c.dp_shard * c.cp * np.where(c.etp == c.tp, 1, c.tp)
    ranks = c.dp_replicate * lanes
    places = (ranks % c.ep == 0) & ((lanes % c.ep == 0) | (c.ep % lanes == 0))
    legal: Bools = places & ((c.tp == 1) | (c.etp == c.tp) | c.sp)
    return legal


def _chunkings(layers: int, pp: int, counts_ends: bool) -> list[int]:
    """Numbers of chunks of a rank, from 2."""
    plain = -(-layers // pp)
    found = []
    for vpp in range(2, MOST_CHUNKS + 1):
        stages = pp * vpp
        whole = counts_ends and (layers + 2) % stages == 0
        if whole or (stages <= layers and -(-layers // stages) * vpp <= plain):
            found.append(vpp)
    return found


def cross(*columns: Sequence[Column]) -> list[Any]:
    """Every combination of one row from each of `columns`, as arrays."""
    arrays = [np.array(rows, np.int64).reshape(len(rows), -1) for rows in columns]
    index = np.indices([len(rows) for rows in arrays]).reshape(len(arrays), -1)
    picked = [rows[which] for rows, which in zip(arrays, index, strict=True)]
    return list(np.concatenate(picked, axis=1).T)


@cache
def divisors(size: int) -> tuple[int, ...]:
    """Ascending."""
    low = [n for n in range(1, int(size**0.5) + 1) if size % n == 0]
    return tuple(sorted({*low, *(size // n for n in low)}))
