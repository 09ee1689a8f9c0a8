"""Seconds of a pipeline from the times of its stages, in closed form.

Checked against `meshwright.plan.timeline`, which executes the schedules action by action.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.cost.candidates import DUALPIPE, DUALPIPEV, ZB1P, ZB2P, ZBV, Candidates

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch on one rank (all its chunks): of the middle ranks, and of the
    slowest one; `weight_s` is the part of the middle's backward that nobody waits for."""

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    slowest_s: Floats
    sum_s: Floats


def busy_s(stages: StageTimes, micro_batches: Floats) -> Floats:
    """What the slowest rank computes in a step."""
    return stages.slowest_s * micro_batches


def bubble_s(stages: StageTimes, c: Candidates) -> Floats:
    """What a rank waits while the pipeline fills and drains; F, B and W are a forward, a whole
    backward and its part for the weights.

    1F1B and GPipe: one micro-batch through all other stages; interleaved: of one chunk each, so
    1/v of it (arXiv 2104.04473). ZB-H1: (p-1)(F+B-2W); ZB-H2: none where F, B-W and W are equal
    (arXiv 2401.10241). DualPipe: (p/2-1)(F&B+B-3W) (arXiv 2412.19437). The V schedules as the
    trainer executes them, read off `plan/timeline.py` for 4 and 8 ranks: (p-1)(F/2 + k(B-2W)), k
    1.3 for ZB-V and 0.6 for DualPipeV; within 5 % of the step.
    """
    forward, backward, weight = stages.forward_s, stages.backward_s, stages.weight_s
    ranks = c.pp - 1
    plain = (stages.sum_s - stages.slowest_s) / np.maximum(c.vpp, 1)
    uneven = np.maximum(backward - 2.0 * weight, 0.0)
    apart = np.maximum(forward, backward - weight) - np.minimum(weight, forward)
    forms = {
        ZB1P: ranks * np.maximum(forward + backward - 2.0 * weight, 0.0),
        ZB2P: ranks * np.maximum(apart, 0.0) / 2.0,
        ZBV: ranks * (0.5 * forward + 1.3 * uneven),
        DUALPIPEV: ranks * (0.5 * forward + 0.6 * uneven),
        DUALPIPE: np.maximum((c.pp / 2 - 1) * (forward + 2.0 * backward - 3.0 * weight), 0.0),
    }
    chosen = [c.schedule == code for code in forms]
    return np.where(c.pp > 1, np.select(chosen, list(forms.values()), plain), 0.0)
