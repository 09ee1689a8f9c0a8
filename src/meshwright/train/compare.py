"""Comparing two traced runs, step by step and tensor by tensor. No torch: numbers only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.opening import newest
from meshwright.checkpoint.pieces import FloatArray

TRACE, GRADIENTS, STATE = "trace.json", "gradients", "state"
# A gradient below this share of the global norm in both runs is rounding: fp32's epsilon.
_ROUNDING = 1.2e-7
_KINDS = {
    "gradient": "gradient",
    "param": "parameter",
    "adamw.m": "first moment",
    "adamw.v": "second moment",
    "router.bias": "router bias",
    "router.load": "router load",
}


@dataclass(frozen=True)
class Limits:
    """Largest relative difference that counts as equal, in fp32.

    `state` is wider: where a gradient is all but zero, AdamW turns its rounding into a full update.
    """

    loss: float = 1e-5
    grad_norm: float = 1e-5
    gradient: float = 1e-4
    state: float = 1e-3


@dataclass(frozen=True)
class StepDifference:
    """One step of the reference and of the layout; `loss_rel` is the larger one of the loss and of
    what routers add to it."""

    step: int
    loss: float
    loss_rel: float
    grad_norm: float
    grad_norm_rel: float


@dataclass(frozen=True)
class TensorDifference:
    """|theirs - reference| / |reference| in the 2-norm, the norms' ratio, and the larger norm."""

    name: str
    what: str  # gradient, parameter, first or second moment, router bias or load
    rel: float
    norm_ratio: float
    norm: float
    equal: bool


@dataclass(frozen=True)
class Comparison:
    """Whether a layout trains the same model; `tensors` from the worst to the best.

    `noise` names parameters left out: their gradient is zero but for rounding (the key bias of
    attention, which softmax ignores), and AdamW makes full updates of it.
    """

    equal: bool
    steps: tuple[StepDifference, ...]
    tensors: tuple[TensorDifference, ...]
    loss_rel: float
    grad_norm_rel: float
    noise: tuple[str, ...] = ()

    @property
    def worst(self) -> tuple[TensorDifference, ...]:
        """The tensors out of bounds, or the worst three if there are none."""
        return tuple(t for t in self.tensors if not t.equal) or self.tensors[:3]

    def as_json(self) -> dict[str, Any]:
        """The document of `check --json`."""
        return {
            "equal": self.equal,
            "loss_rel": self.loss_rel,
            "grad_norm_rel": self.grad_norm_rel,
            "worst": [asdict(t) for t in self.worst],
            "steps": [asdict(s) for s in self.steps],
            "tensors": len(self.tensors),
            "noise": list(self.noise),
        }


def compare(reference: Path, theirs: Path, limits: Limits) -> Comparison:
    """Compare what two traced runs left. Raises CheckpointError if one is incomplete."""
    steps = tuple(_steps(reference, theirs))
    gradients = list(_tensors(reference / GRADIENTS, theirs / GRADIENTS, limits.gradient))
    state = _tensors(reference / STATE, theirs / STATE, limits.state)
    floor = _ROUNDING * steps[0].grad_norm
    noise = tuple(t.name for t in gradients if t.norm < floor)
    compared = [t for t in (*gradients, *state) if t.name not in noise]
    tensors = sorted(compared, key=lambda t: (t.equal, -t.rel))
    loss_rel = max(s.loss_rel for s in steps)
    grad_norm_rel = max(s.grad_norm_rel for s in steps)
    equal = (
        loss_rel <= limits.loss
        and grad_norm_rel <= limits.grad_norm
        and all(t.equal for t in tensors)
    )
    return Comparison(equal, steps, tuple(tensors), loss_rel, grad_norm_rel, noise)


def _steps(reference: Path, theirs: Path) -> Iterator[StepDifference]:
    rows = zip(_trace(reference), _trace(theirs), strict=True)
    for step, (ours, other) in enumerate(rows, 1):
        yield StepDifference(
            step=step,
            loss=other["loss"],
            loss_rel=max(_relative(other[key], ours[key]) for key in ("loss", "router_loss")),
            grad_norm=other["grad_norm"],
            grad_norm_rel=_relative(other["grad_norm"], ours["grad_norm"]),
        )


def _trace(folder: Path) -> list[dict[str, float]]:
    try:
        rows: list[dict[str, float]] = json.loads((folder / TRACE).read_text())
    except OSError as error:
        raise CheckpointError(
            f"{folder / TRACE}: {error.strerror}; the run left no trace"
        ) from error
    return rows


def _relative(value: float, reference: float) -> float:
    """|value - reference| / |reference|; infinite for what is not a number."""
    if value == reference:
        return 0.0
    gap = abs(value - reference) / abs(reference) if reference else math.inf
    return gap if math.isfinite(gap) else math.inf


def _tensors(reference: Path, theirs: Path, limit: float) -> Iterator[TensorDifference]:
    ours, other = newest(reference), newest(theirs)
    names = [name for name in ours.names if name.partition("/")[0] in _KINDS]
    theirs_too = [name for name in other.names if name.partition("/")[0] in _KINDS]
    if unequal := set(names) ^ set(theirs_too):
        raise CheckpointError(f"{theirs}: only one of both runs has {', '.join(sorted(unequal))}")
    for stored in names:
        kind, _, name = stored.partition("/")
        what = _KINDS[kind]
        yield tensor_difference(name, what, ours.read(stored), other.read(stored), limit)


def tensor_difference(
    name: str, what: str, reference: FloatArray, theirs: FloatArray, limit: float
) -> TensorDifference:
    """Compare two equal-shaped tensors in fp64."""
    expected, found = reference.astype(np.float64), theirs.astype(np.float64)
    size, other = float(np.linalg.norm(expected)), float(np.linalg.norm(found))
    gap = float(np.linalg.norm(found - expected))
    rel = 0.0 if gap == 0 else (gap / size if size else math.inf)
    rel = rel if math.isfinite(rel) else math.inf
    ratio = other / size if size else (math.inf if gap else 1.0)
    return TensorDifference(name, what, rel, ratio, max(size, other), rel <= limit)
