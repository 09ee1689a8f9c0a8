"""How likely a layout runs out of memory: what is uncertain, put together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshwright.plan.cost.candidates import Floats
from meshwright.plan.cost.framework import Framework
from meshwright.plan.cost.memory import OUTSIDE, TENSORS, Memory, add

NODES = 24  # equally likely loads; the tail that matters is 1 / NODES wide
FROM_MEDIAN_TO_P95 = 1.6449  # standard deviations of a normal distribution


@dataclass(frozen=True)
class Imbalance:
    """Load of the fullest expert rank over the mean, worst over a run, as a lognormal distribution.

    `cap` is what a capacity factor lets through at most; 0: dropless.
    """

    median: float = 1.0
    p95: float = 1.0
    cap: float = 0.0
    origin: str = "forced balance"

    @property
    def sigma(self) -> float:
        """Spread of the logarithm."""
        return math.log(self.p95 / self.median) / FROM_MEDIAN_TO_P95

    @property
    def mean(self) -> float:
        """Expected load."""
        return float(np.mean(self.loads()))

    def loads(self) -> Floats:
        """Equally likely loads."""
        middle = (np.arange(NODES) + 0.5) / NODES
        loads = self.median * np.exp(self.sigma * normal_quantile(middle))
        return np.minimum(loads, self.cap) if self.cap else loads


# Mixtral 8x7B in Megatron-LM's CI, thousands of steps: what is beyond its states is explained by a
# fullest rank with 2.3 times the mean; the same family after 30 to 50 steps by 1.0. Reports of
# 1.2 to 3 and more early in training: facts/planning.md 6.1, DeepEP#99, megablocks#154.
NATURAL = Imbalance(median=1.3, p95=2.3, origin="assumed: natural routing with a balancing loss")
BALANCED = Imbalance()


def oom_probability(
    memory: Memory,
    framework: Framework,
    capacity_bytes: float,
    imbalance: Imbalance = BALANCED,
    priced_imbalance: float = 1.0,
    reserve_bytes: float = 0.0,
) -> Floats:
    """Probability, for each candidate, that the chip has too little.

    Three things are uncertain, each lognormal: measured over predicted tensors (`framework.sigma`,
    from rows that the fit has not seen), reserved over allocated (`slack_sigma`), and the load of
    the fullest expert rank, which scales the experts' activations alone; `priced_imbalance` is what
    `memory` was priced with. `reserve_bytes` is what others hold of `capacity_bytes`.
    """
    experts = memory.parts["experts"] / priced_imbalance
    rest = add(memory.parts, TENSORS) - memory.parts["experts"]
    outside = add(memory.parts, OUTSIDE) - memory.parts["slack"]
    room = np.maximum(capacity_bytes - reserve_bytes - outside, 1.0)
    spread = math.hypot(framework.sigma, framework.slack_sigma)
    total = np.zeros_like(rest)
    loads = imbalance.loads()
    for load in loads:
        middle = (rest + experts * load) * (1.0 + framework.slack)
        distance = np.log(middle / room)
        total = total + (normal_below(distance / spread) if spread else 1.0 * (distance > 0))
    return total / len(loads)


def interval(
    memory: Memory, framework: Framework, deviations: float = 1.2816
) -> tuple[Floats, Floats]:
    """Total bytes that four runs of five lie between (`deviations` to each side)."""
    spread = math.exp(deviations * math.hypot(framework.sigma, framework.slack_sigma))
    fixed = memory.parts["context"] + memory.parts["communicators"]
    return memory.reserved_bytes / spread + fixed, memory.reserved_bytes * spread + fixed


def normal_below(deviations: Floats) -> Floats:
    """Probability below so many standard deviations (Abramowitz and Stegun 7.1.26, error 1e-7)."""
    x = np.abs(deviations) / math.sqrt(2.0)
    t = 1.0 / (1.0 + 0.3275911 * x)
    series = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    tail = np.zeros_like(t)
    for factor in reversed(series):
        tail = (tail + factor) * t
    below = 0.5 * tail * np.exp(-(x**2))
    return np.where(deviations < 0, below, 1.0 - below)


def normal_quantile(probability: Floats) -> Floats:
    """Inverse of `normal_below`, by halving."""
    low, high = np.full_like(probability, -9.0), np.full_like(probability, 9.0)
    for _ in range(50):
        middle = (low + high) / 2
        under = normal_below(middle) < probability
        low, high = np.where(under, middle, low), np.where(under, high, middle)
    return (low + high) / 2
