"""The constants of step time, fitted on published runs by a robust Gauss-Newton in log space.

Every constant has a prior from physics or from public measurements, so that what no run speaks for
stays where it is. No constant belongs to a row or to a source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.cost.constants import ASSUMED, Constant, Constants
from meshwright.plan.validate.time_model import Columns

Floats = NDArray[np.float64]
Residuals = Callable[[Floats], Floats]
Cost = Callable[[Floats, Floats], float]

SCALE = 0.08  # residuals above this count less and less (Cauchy)
STEP = 1e-3  # of a logarithm, for finite differences
# Shares cannot pass these, whatever the runs say.
CEILINGS: Mapping[str, float] = {
    "product": 0.95, "product8": 0.95, "product4": 0.95, "attention": 0.9, "grouped": 1.0,
    "tp_hidden": 0.98, "dp_hidden": 1.0, "ep_hidden": 0.98, "shard_hidden": 1.0,
    "hop_hidden": 1.0, "link": 0.95, "network": 0.95,
}  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """Constants, and for every run ln(predicted / measured)."""

    constants: Constants
    residuals: Floats


def fit(columns: Columns, start: Constants, weights: Floats, rounds: int = 8) -> Fit:
    """Constants that agree best with `columns`, from the priors of `start`."""
    free = [name for name, constant in start.table.items() if constant.spread > 0]
    spread = np.array([start.table[name].spread for name in free])
    measured = np.log(columns.measured_s)

    def residuals(moves: Floats) -> Floats:
        values = _values(start, free, moves)
        return np.asarray(np.log(columns.predict(values, start.like)["step"]) - measured)

    def cost(found: Floats, moves: Floats) -> float:
        loss = np.log1p((found / SCALE) ** 2)
        return float(np.sum(weights * loss) + np.sum((moves / spread) ** 2))

    moves = np.zeros(len(free))
    now = residuals(moves)
    for _ in range(rounds):
        slopes = _slopes(residuals, moves, now)
        better = _improve(residuals, cost, (moves, now), (slopes, weights, spread))
        if better is None:
            break
        gained = cost(now, moves) - cost(better[1], better[0])
        moves, now = better
        if gained < 1e-3 * cost(now, moves):
            break
    errors = _errors(_slopes(residuals, moves, now), now, weights, spread)
    return Fit(_with(start, free, moves, errors), now)


def _values(start: Constants, free: Sequence[str], moves: Floats) -> dict[str, float]:
    values = {name: constant.prior for name, constant in start.table.items()}
    for name, move in zip(free, moves, strict=True):
        moved = values[name] * float(np.exp(move))
        values[name] = min(moved, CEILINGS.get(name.partition(".")[0], np.inf))
    return values


def _slopes(residuals: Residuals, moves: Floats, now: Floats) -> Floats:
    columns = []
    for index in range(len(moves)):
        moved = moves.copy()
        moved[index] += STEP
        columns.append((residuals(moved) - now) / STEP)
    return np.stack(columns, axis=1)


def _normal(slopes: Floats, now: Floats, weights: Floats, spread: Floats) -> tuple[Floats, Floats]:
    """Curvature of the cost, and the weights of its gradient."""
    pull = weights / (SCALE**2 + now**2)
    return slopes.T @ (pull[:, None] * slopes) + np.diag(spread**-2.0), pull


def _improve(
    residuals: Residuals, cost: Cost, here: tuple[Floats, Floats], local: tuple[Floats, ...]
) -> tuple[Floats, Floats] | None:
    """A step that lowers the cost, damped until it does; None where there is none."""
    (moves, now), (slopes, weights, spread) = here, local
    curvature, pull = _normal(slopes, now, weights, spread)
    gradient = slopes.T @ (pull * now) + moves / spread**2
    damping = 1e-3
    for _ in range(8):
        damped = curvature + damping * np.diag(np.diag(curvature))
        moved = moves + np.clip(np.linalg.solve(damped, -gradient), -0.5, 0.5)
        found = residuals(moved)
        if cost(found, moved) < cost(now, moves):
            return moved, found
        damping *= 6.0
    return None


def _errors(slopes: Floats, now: Floats, weights: Floats, spread: Floats) -> Floats:
    """Standard deviations of the logarithms that were fitted."""
    curvature, _ = _normal(slopes, now, weights, spread)
    return np.asarray(np.sqrt(np.diag(np.linalg.inv(curvature))))


def _with(start: Constants, free: Sequence[str], moves: Floats, errors: Floats) -> Constants:
    """`start` with what was found. A constant that its runs pin down no better than the prior did
    is an assumption."""
    values = _values(start, free, moves)
    error = dict(zip(free, errors, strict=True))
    table: dict[str, Constant] = {}
    for name, constant in start.table.items():
        known = error.get(name, constant.spread)
        kind = "measured" if name in error and known < 0.7 * constant.spread else ASSUMED
        table[name] = replace(constant, value=values[name], error=float(known), kind=kind)
    return replace(start, table=table)


def source_weights(columns: Columns) -> Floats:
    """Rows of a large source count less, so that no source drowns the others."""
    names = [run.source.key for run in columns.runs]
    count = Counter(names)
    return np.array([5.0 / np.sqrt(count[name]) for name in names])


def folds(columns: Columns, parts: int = 5) -> NDArray[np.int64]:
    """The fold of every run: whole sources, the largest first, each into the smallest fold."""
    names = [run.source.key for run in columns.runs]
    sizes = [0] * parts
    chosen: dict[str, int] = {}
    for name, size in sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])):
        chosen[name] = sizes.index(min(sizes))
        sizes[chosen[name]] += size
    return np.array([chosen[name] for name in names])


def cross_validate(columns: Columns, start: Constants, parts: int = 5) -> Floats:
    """ln(predicted / measured) of every run, with constants whose fit saw no run of its source."""
    weights, fold = source_weights(columns), folds(columns, parts)
    unseen = np.zeros(len(columns.runs))
    for part in range(parts):
        held = fold == part
        found = fit(columns, start, np.where(held, 0.0, weights))
        unseen[held] = found.residuals[held]
    return unseen
