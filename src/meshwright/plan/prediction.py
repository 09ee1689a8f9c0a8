"""What one layout takes: time, memory, money, each with its interval and what it rests on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.plan.cost.candidates import Candidates, Floats
from meshwright.plan.cost.data import read_seconds
from meshwright.plan.cost.memory import Memory, memory
from meshwright.plan.cost.oom import interval, oom_probability
from meshwright.plan.cost.step import step_time
from meshwright.plan.layout import Layout
from meshwright.plan.search_legal import check_layout
from meshwright.plan.search_notation import layout_precision, write_layout
from meshwright.plan.search_question import Question

GIB = 2.0**30
TRILLION = 1e12
TIGHT = 0.02  # probability of running out from which fragmentation is worth a word
GPU_VENDORS = ("NVIDIA", "AMD")


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
    """What `layout` takes. Raises ConfigError if it is for another number of chips, the batch
    cannot be shared out, or no trainer could run it on this model."""
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
        assumptions=(*assumptions(question, time.assumed), *_fragments(question, used, risk)),
    )


def micro_batches(question: Question, layout: Layout) -> int:
    """Micro-batches that a pipeline rank works on in a step."""
    return question.global_batch // (layout.dp * layout.micro_batch)


def _check(question: Question, layout: Layout) -> None:
    if layout.world != question.cluster.chips:
        fix = f"is for {layout.world} chips, {question.cluster.name} has {question.cluster.chips}"
        raise ConfigError("layout", write_layout(layout), fix)
    unit = layout.dp * layout.micro_batch
    if question.global_batch % unit:
        fix = f"is not a multiple of dp x micro_batch = {layout.dp} x {layout.micro_batch} = {unit}"
        raise ConfigError("global_batch", question.global_batch, fix)
    check_layout(question, layout)


def _fragments(question: Question, used: Memory, risk: Floats) -> tuple[str, ...]:
    """What to do about memory that an allocator holds without using it, where memory is tight.

    Only PyTorch's allocator on GPUs has segments (NVIDIA-NeMo/RL#919: a model fits with them only).
    """
    if question.cluster.chip.vendor not in GPU_VENDORS or risk[0] < TIGHT:
        return ()
    return (
        f"memory is tight (P(oom) {risk[0]:.0%}), {used.parts['slack'][0] / 1e9:.1f} GB of it is "
        "fragmentation: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


def _data(question: Question) -> str:
    """What a step reads, and how fast."""
    work, cluster = question.work, question.cluster
    speed = cluster.nodes * cluster.storage_bytes_s_per_node
    if work.sample_bytes is None:
        each = f"{work.token_bytes} bytes a token"
    else:
        each = f"{work.sample_bytes / 1e3:.3g} kB each"
    return (
        f"data: a step reads {work.read_bytes / 1e6:.3g} MB of samples ({each}, read once), "
        f"{read_seconds(work, cluster):.2g} s at {speed / 1e9:.3g} GB/s, beside the arithmetic"
    )


def assumptions(question: Question, assumed: tuple[str, ...]) -> tuple[str, ...]:
    """What an answer rests on, as lines."""
    lines = list(question.notes)
    lines.append(_data(question))
    lines.append(
        f"MFU: model FLOPs, {'causal' if question.causal else 'full'} attention, no recomputation, "
        f"over the dense "
        f"{question.precision} peak of {question.peak_flops / 1e12:.3g} TFLOP/s a chip"
    )
    lines.append(
        "time is of ranks placed tp innermost, then cp, dp and pp, whatever order the mapping finds"
    )
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
