"""The few fitted constants of the memory model, and what they miss by on rows not seen.

A constant belongs to a framework, never to a row or a source. It is fitted by a small grid, one
constant after the other, on the mean over cases of a case's median |log(predicted / measured)|: a
case that was run on many machines counts once. Folds are by case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.cost.framework import Framework, framework

FOLDS = 5
LARGE_BYTES = 8 * 2**30  # below, the runtime's floor rules
GRIDS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "megatron": {
        "floor_bytes": (0.1e9, 0.2e9, 0.3e9, 0.4e9, 0.5e9, 0.7e9),
        "logit_bytes": (5.0, 6.0, 7.0, 8.0),
        "logit_compiled_bytes": (6.0, 8.0, 10.0, 12.0, 14.0),
        "expert_outputs": (0.0, 0.5, 1.0),
    },
    "megatron-deepspeed": {"slack": (0.035, 0.06, 0.09, 0.12, 0.15)},
    "kempnerforge": {"logit_bytes": (4.0, 6.0, 8.0, 10.0)},
    "nanotron": {
        "gated_tensors": (3.0, 4.0, 5.0),
        "norm_tensors": (2.0, 3.0, 4.0),
        "attention_extra": (0.0, 1.0),
    },
}  # fmt: skip


class Measured(Protocol):
    """A run with a measured peak."""

    @property
    def case(self) -> str:
        """What is not split over folds."""
        ...

    @property
    def peak_bytes(self) -> float:
        """What was measured."""
        ...

    def predicted_bytes(self, constants: Framework | None = None) -> float:
        """What is predicted with `constants`."""
        ...


@dataclass(frozen=True)
class Fitted:
    """Constants of a framework, and the relative error of every row where its own fold was left
    out of the fit."""

    values: Mapping[str, float]
    unseen: NDArray[np.float64]


def relative_errors(
    runs: Sequence[Measured], constants: Framework | None = None
) -> NDArray[np.float64]:
    """Predicted over measured, less one, of every run."""
    return np.array([run.predicted_bytes(constants) / run.peak_bytes - 1.0 for run in runs])


class Trials:
    """Errors of runs under tried constants; each choice is priced once, whatever fold asks."""

    def __init__(self, name: str, runs: Sequence[Measured]) -> None:
        self.name, self.runs = name, runs
        self.cases = np.array([run.case for run in runs])
        self._tried: dict[str, NDArray[np.float64]] = {}

    def errors(self, constants: Framework) -> NDArray[np.float64]:
        """Relative error of every run."""
        if (key := repr(constants)) not in self._tried:
            self._tried[key] = relative_errors(self.runs, constants)
        return self._tried[key]

    def loss(self, constants: Framework, seen: NDArray[np.bool_]) -> float:
        """The mean over `seen` cases of the median |log(predicted / measured)| of a case."""
        logs = np.abs(np.log1p(self.errors(constants)))
        cases = np.unique(self.cases[seen])
        return float(np.mean([np.median(logs[seen & (self.cases == case)]) for case in cases]))

    def fit(self, seen: NDArray[np.bool_]) -> Framework:
        """Constants for the runs `seen`: each in turn, twice, from the middle of every grid, so
        that nothing of an earlier fit is left."""
        grids = GRIDS.get(self.name, {})
        middle: dict[str, Any] = {key: grid[len(grid) // 2] for key, grid in grids.items()}
        best = replace(framework(self.name), **middle)
        for _ in range(2):
            for constant, grid in grids.items():
                tried = [replace(best, **{constant: value}) for value in grid]  # type: ignore[arg-type]
                best = min([best, *tried], key=lambda one: self.loss(one, seen))
        return best


def cross_validate(name: str, runs: Sequence[Measured]) -> Fitted:
    """Fit on all runs; and the errors of each fold's runs with what the other folds give."""
    trials = Trials(name, runs)
    folds = np.unique(trials.cases, return_inverse=True)[1] % FOLDS
    unseen = np.zeros(len(runs))
    for fold in np.unique(folds):
        inside = folds == fold
        constants = framework(name) if inside.all() else trials.fit(~inside)
        unseen[inside] = trials.errors(constants)[inside]
    chosen = trials.fit(np.ones(len(runs), dtype=bool))
    return Fitted({key: getattr(chosen, key) for key in GRIDS.get(name, {})}, unseen)
