"""Why a layout takes what it takes, why not another one, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from meshwright.base.errors import ConfigError
from meshwright.catalog import Cluster
from meshwright.plan.cost.workload import Precision
from meshwright.plan.layout import Layout
from meshwright.plan.prediction import Prediction, micro_batches, predict
from meshwright.plan.search import search
from meshwright.plan.search_notation import write_layout
from meshwright.plan.search_question import Question
from meshwright.plan.search_space import Abilities, abilities

TITLES = {
    "compute": "compute",
    "tp": "tensor-parallel traffic that nothing hides",
    "cp": "context-parallel traffic that nothing hides",
    "ep": "expert traffic that nothing hides",
    "shard": "ZeRO-3 traffic that nothing hides",
    "host": "chips waiting for their hosts to start kernels",
    "bubble": "pipeline bubble",
    "p2p": "messages between pipeline stages",
    "dp": "gradient and weight traffic that nothing hides",
    "optimizer": "optimizer",
    "overhead": "logging, batches and stragglers",
    "data": "data that nothing hides",
}
TIE = 0.01  # below a hundredth two predictions do not differ


@dataclass(frozen=True)
class Change:
    """One thing changed: what, and by how much the step gets shorter (1.2: 20 % faster)."""

    what: str
    speedup: float
    fits: bool
    layout: str

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return dict(vars(self))


def bound(prediction: Prediction) -> str:
    """One line: what a step spends most of its time on, beyond useful arithmetic."""
    parts, step = prediction.time_parts, prediction.step_time_s
    share = parts["compute"] / step
    name, seconds = max(
        ((name, part) for name, part in parts.items() if name != "compute"), key=lambda i: i[1]
    )
    if share >= 0.5:
        useful = prediction.mfu / share
        return (
            f"compute ({share:.0%} of the step, in which {useful:.0%} of the peak is useful work); "
            f"next: {TITLES[name]} ({seconds / step:.0%})"
        )
    return f"{TITLES[name]} ({seconds / step:.0%} of the step; compute is {share:.0%})"


def levers(question: Question, best: Prediction) -> list[Change]:
    """Single changes outside the layout, the layout searched anew under each; most helpful first.

    What the layout itself offers has been searched already.
    """
    found = []
    for what, changed in _changes(question):
        there = search(changed)
        if not len(there.best):
            continue
        speed = changed.tokens / there.best.step_s[0]
        name = write_layout(there.best.candidates.layout(0))
        found.append(Change(what, speed / best.tokens_per_s, True, name))
    return sorted(found, key=lambda change: -change.speedup)


def _changes(question: Question) -> Iterator[tuple[str, Question]]:
    chip, levels = question.cluster.chip, question.cluster.levels
    lower = {"bf16": "fp8", "fp16": "fp8", "fp32": "bf16"}.get(question.precision)
    for precision in get_args(Precision):
        if precision == lower and precision in chip.peak_flops and chip.name != "cpu":
            yield f"precision {precision}", replace(question, precision=precision)
    double = 2 * question.global_batch
    yield f"global batch {double} (twice)", replace(question, global_batch=double)
    cluster = question.cluster
    if len(levels) > 1:
        faster = tuple(
            replace(level, bandwidth_bytes_s=level.bandwidth_bytes_s * (2 if place else 1))
            for place, level in enumerate(levels)
        )
        yield "a network between domains twice as fast", _with(question, cluster, levels=faster)
    if chip.name != "cpu":
        larger = replace(chip, memory_bytes=1.5 * chip.memory_bytes)
        yield "half as much memory again on a chip", _with(question, cluster, chip=larger)


def _with(question: Question, cluster: Cluster, **changed: Any) -> Question:
    return question.on(replace(cluster, **changed))


def neighbours(question: Question, layout: Layout) -> list[Change]:
    """Every single change of a layout that is legal; most helpful first, those that do not fit
    last. What is freed or taken by an axis is given to or taken from data parallelism."""
    here, can = predict(question, layout), abilities(question.framework.name)
    found = []
    for what, other in _moves(layout, question.spec.n_experts, can):
        try:
            there = predict(question, other)
        except (ConfigError, ValueError):
            continue
        if there.step_time_s == here.step_time_s:
            continue
        fits = there.oom_probability <= question.risk
        found.append(Change(what, here.step_time_s / there.step_time_s, fits, there.name))
    return sorted(found, key=lambda change: (not change.fits, -change.speedup))


def _moves(layout: Layout, experts: int, can: Abilities) -> Iterator[tuple[str, Layout]]:
    raw = layout.model_dump()
    for axis in ("tp", "pp", "cp", *(("ep",) if experts else ())):
        for factor in (2, 0.5):
            yield from _resized(raw, axis, factor)
    settings: dict[str, list[Any]] = {
        "micro_batch": [n for n in (layout.micro_batch * 2, layout.micro_batch // 2) if n],
        "recompute": ["none", "selective", "full"],
        "zero": list(can.zero),
    }
    for key, values in settings.items():
        for value in values:
            if value != raw[key]:
                yield from _built(f"{key} {raw[key]} -> {value}", {**raw, key: value})
    for vpp in sorted({2, 4, layout.vpp * 2} - {layout.vpp}):
        if layout.pp > 1:
            changed = {"vpp": vpp, "schedule": "interleaved"}
            yield from _built(f"interleave {vpp} chunks a rank", {**raw, **changed})


def _resized(raw: dict[str, Any], axis: str, factor: float) -> Iterator[tuple[str, Layout]]:
    """`axis` grown or shrunk, and the larger of the data axes the other way."""
    size = raw[axis] * factor
    data = "dp_shard" if raw["dp_shard"] >= raw["dp_replicate"] else "dp_replicate"
    rest = raw[data] / (1 if axis == "ep" else factor)
    if size < 1 or rest < 1 or size % 1 or rest % 1:
        return
    changed = {**raw, axis: int(size), data: int(rest)}
    if axis == "tp" and raw["etp"] == raw["tp"] > 1:
        changed["etp"] = int(size)
    if axis == "pp" and size == 1:
        changed |= {"vpp": 1, "schedule": "1f1b"}
    if changed["dp_shard"] * changed["cp"] == 1:
        changed["zero"] = 0
    yield from _built(f"{axis}{raw[axis]} -> {axis}{int(size)}", changed)


def _built(what: str, raw: dict[str, Any]) -> Iterator[tuple[str, Layout]]:
    try:
        yield what, Layout.model_validate(raw)
    except ValueError:  # a combination that no layout can have
        return


@dataclass(frozen=True)
class Comparison:
    """Two layouts of one question: `verdict` in a line, `seconds` and `bytes` by which the second
    exceeds the first, part by part, the largest difference first."""

    chosen: Prediction
    other: Prediction
    verdict: str
    seconds: dict[str, float]
    bytes: dict[str, float]

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "verdict": self.verdict,
            "chosen": self.chosen.document(),
            "other": self.other.document(),
            "seconds_more": self.seconds,
            "bytes_more": self.bytes,
        }


def compare(question: Question, chosen: Prediction, other: Prediction) -> Comparison:
    """Why `chosen` and not `other`."""
    seconds = _difference(chosen.time_parts, other.time_parts)
    memory = _difference(chosen.memory_parts, other.memory_parts)
    return Comparison(chosen, other, _verdict(question, chosen, other, seconds), seconds, memory)


def _difference(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    more = {name: second[name] - first[name] for name in first}
    return dict(sorted(more.items(), key=lambda item: -abs(item[1])))


def _verdict(
    question: Question, chosen: Prediction, other: Prediction, seconds: dict[str, float]
) -> str:
    if other.oom_probability > question.risk >= chosen.oom_probability:
        return (
            f"{other.name} does not fit: it runs out of memory with a probability of "
            f"{other.oom_probability:.0%} ({other.memory_bytes / 1e9:.0f} of "
            f"{other.capacity_bytes / 1e9:.0f} GB)"
        )
    ratio = other.step_time_s / chosen.step_time_s
    if abs(ratio - 1) < TIE:
        return f"a tie: {other.name} takes as long ({ratio - 1:+.1%})"
    slower = ratio > 1
    name = next(part for part, more in seconds.items() if (more > 0) == slower)
    few = f"; {too_few(question, other)}" if name == "bubble" and slower else ""
    return (
        f"{other.name} takes {ratio:.2f} times as long, most of all in {TITLES[name]} "
        f"({seconds[name]:+.3g} s of a step){few}"
    )


def too_few(question: Question, here: Prediction) -> str:
    """Why a pipeline has a bubble, and the ways out."""
    count, stages = micro_batches(question, here.layout), here.layout.pp
    return (
        f"too few micro-batches ({count}) for {stages} stages: fewer stages, smaller "
        "micro-batches, more chunks a rank or a larger global batch shorten it"
    )
