"""What one rank of our own trainer holds, computes and sends in a step, without running it.

The step is walked through as the trainer does it (schedule, layers, flat groups, update), on sizes
alone: own code, from the trainer's rules, with no torch. `meshwright dryrun` measures the same
quantities on the trainer itself; the two agree (tests/unit/plan/test_own.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.base.errors import ConfigError
from meshwright.plan.job import Job
from meshwright.plan.own_rank import Rank
from meshwright.plan.own_step import Step
from meshwright.plan.parts import PARTS


@dataclass(frozen=True)
class Sending:
    """All collectives of one kind on one axis in a step."""

    axis: str
    kind: str
    ranks: int
    count: int
    payload_bytes: int
    wire_bytes: float


@dataclass(frozen=True)
class OwnStep:
    """One step of one rank: bytes by part at the moment of the peak, FLOPs by phase, collectives.

    Assumes eager GPU kernels (fused norms and attention), balanced routing, a step in the middle of
    a run. Bytes are those of tensors: what allocator, runtime and libraries take is not counted.
    """

    peak_bytes: int
    parts_bytes: dict[str, int]
    flops: dict[str, int]
    traffic: tuple[Sending, ...]


def own_step(job: Job, rank: int = 0) -> OwnStep:
    """Predict a step of `rank`. Raises ConfigError for what has no prediction here."""
    _refuse_unknown(job)
    here = Rank(job, rank)
    Step(here).run()
    peak = here.tape.peak
    parts: dict[str, int] = {part: peak[part] for part in PARTS}
    parts["communication"] += peak["travelling"]
    return OwnStep(
        peak_bytes=sum(parts.values()),
        parts_bytes=parts,
        flops={phase: here.flops[phase] for phase in ("forward", "backward", "recompute")},
        traffic=tuple(
            Sending(axis, kind, s.ranks, s.count, s.payload_bytes, s.wire_bytes)
            for (axis, kind), s in sorted(here.sent.items())
        ),
    )


def _refuse_unknown(job: Job) -> None:
    layout = job.layout
    wrong: Sequence[tuple[str, object, bool]] = (
        ("layout.precision", layout.precision, layout.precision == "fp8"),
        ("layout.grad_compression", layout.grad_compression, layout.grad_compression != "none"),
        ("layout.expert_replicas", layout.expert_replicas, layout.expert_replicas > 0),
        ("layout.offload", layout.offload, layout.offload in ("activations", "both")),
        ("model.dropout", job.model.dropout, job.model.dropout > 0),
    )
    for key, value, bad in wrong:
        if bad:
            raise ConfigError(key, value, "is not predicted without a run; use meshwright dryrun")
