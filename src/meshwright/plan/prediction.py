"""What one layout takes: time, memory, money, each with its interval and what it rests on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.plan.cost.candidates import Candidates
from meshwright.plan.cost.memory import memory
from meshwright.plan.cost.oom import interval, oom_probability
from meshwright.plan.cost.step import step_time
from meshwright.plan.layout import Layout
from meshwright.plan.search_notation import layout_precision, write_layout
from meshwright.plan.search_question import Question

GIB = 2.0**30
TRILLION = 1e12


@dataclass(frozen=True)
class Prediction:
    """One layout. Seconds are of a step, `low` and `high` what four of five runs lie between;
    bytes are of the heaviest chip; `dollars_per_trillion_tokens` is None without a price."""

    layout: Layout
    name: str
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    time_parts: dict[str, float]
    tokens_per_s: float
    tokens_per_s_per_chip: float
    tflops_per_chip: float
    mfu: float
    peak_flops_per_chip: float
    memory_bytes: float
    memory_low_bytes: float
    memory_high_bytes: float
    memory_parts: dict[str, float]
    heaviest_pp_rank: int
    capacity_bytes: float
    oom_probability: float
    dollars_per_trillion_tokens: float | None
    origin: str
    assumptions: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As plain JSON, the keys that DESIGN.md names among them."""
        found = asdict(self)
        found["layout"] = self.layout.model_dump()
        found["assumptions"] = list(self.assumptions)
        return found


def candidate(layout: Layout) -> Candidates:
    """One layout as a column."""
    return Candidates.from_layouts([layout])


def layout_of(question: Question, c: Candidates, index: int) -> Layout:
    """Candidate `index` in the precision of the question."""
    precision = layout_precision(question.precision)
    return c.layout(index).model_copy(update={"precision": precision})


def predict(question: Question, layout: Layout) -> Prediction:
    """What `layout` takes. Raises ConfigError if it is for another number of chips, or the batch
    cannot be shared out."""
    _check(question, layout)
    work, c, chip = question.work, candidate(layout), question.cluster.chip
    time = step_time(work, question.cluster, c, question.constants)
    used = memory(work, c)
    low, high = interval(used, question.framework)
    risk = oom_probability(used, question.framework, chip.memory_bytes, question.imbalance)
    step_s = float(time.step_s[0])
    price = question.cluster.price_per_chip_hour
    speed = question.tokens / step_s
    return Prediction(
        layout=layout,
        name=write_layout(layout),
        step_time_s=step_s,
        step_time_low_s=float(time.low_s[0]),
        step_time_high_s=float(time.high_s[0]),
        time_parts={name: float(part[0]) for name, part in time.parts.items()},
        tokens_per_s=speed,
        tokens_per_s_per_chip=speed / question.cluster.chips,
        tflops_per_chip=question.flops_per_chip / step_s / 1e12,
        mfu=question.flops_per_chip / step_s / question.peak_flops,
        peak_flops_per_chip=question.peak_flops,
        memory_bytes=float(used.total_bytes[0]),
        memory_low_bytes=float(low[0]),
        memory_high_bytes=float(high[0]),
        memory_parts={name: float(part[0]) for name, part in used.parts.items()},
        heaviest_pp_rank=int(used.rank[0]),
        capacity_bytes=chip.memory_bytes,
        oom_probability=float(risk[0]),
        dollars_per_trillion_tokens=None
        if price is None
        else price * question.cluster.chips / 3600.0 / speed * TRILLION,
        origin=time.origin,
        assumptions=assumptions(question, time.assumed),
    )


def _check(question: Question, layout: Layout) -> None:
    if layout.world != question.cluster.chips:
        fix = f"is for {layout.world} chips, {question.cluster.name} has {question.cluster.chips}"
        raise ConfigError("layout", write_layout(layout), fix)
    unit = layout.dp * layout.micro_batch
    if question.global_batch % unit:
        fix = f"is not a multiple of dp x micro_batch = {layout.dp} x {layout.micro_batch} = {unit}"
        raise ConfigError("global_batch", question.global_batch, fix)
    if layout.pp > question.spec.layers:
        fix = f"is more than the {question.spec.layers} layers of the model"
        raise ConfigError("layout.pp", layout.pp, fix)
    for name in ("heads",) if question.spec.latent_attention else ("heads", "kv_heads"):
        if getattr(question.spec, name) % layout.tp:
            fix = f"does not divide {name} = {getattr(question.spec, name)}"
            raise ConfigError("layout.tp", layout.tp, fix)


def assumptions(question: Question, assumed: tuple[str, ...]) -> tuple[str, ...]:
    """What an answer rests on, as lines."""
    lines = list(question.notes)
    lines.append(
        f"MFU: model FLOPs, causal attention, no recomputation, over the dense "
        f"{question.precision} peak of {question.peak_flops / 1e12:.3g} TFLOP/s a chip"
    )
    lines.append("ranks are placed tp innermost, then cp, dp and pp")
    lines.append(f"framework: {question.framework.origin}")
    if question.spec.n_experts:
        spread = question.imbalance
        lines.append(
            "time counts evenly loaded experts; memory a fullest rank of "
            f"{spread.median:g} times the mean (one run in twenty: {spread.p95:g}), {spread.origin}"
        )
    if assumed:
        lines.append("constants that no published run pins down: " + ", ".join(assumed))
    lines += [f"catalogue: {line}" for line in question.cluster.assumptions]
    return tuple(lines)
