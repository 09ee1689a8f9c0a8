"""Closed forms of bubbles against the schedules themselves, executed action by action."""

import numpy as np
import pytest
from numpy.typing import NDArray

from meshwright.plan.cost.candidates import SCHEDULES, Candidates
from meshwright.plan.cost.pipeline import StageTimes, bubble_s, busy_s
from meshwright.plan.layout import Schedule
from meshwright.plan.schedule import Action, build
from meshwright.plan.timeline import Costs, simulate

EVEN = (1.0, 1.0, 1.0)
LLAMA = (1.0, 1.2, 0.8)  # attention has no weights: the input part of its backward is longer


def closed_s(schedule: str, pp: int, vpp: int, count: int, times: tuple[float, ...]) -> float:
    forward, back_input, weight = times
    whole = forward + back_input + weight

    def one(value: float) -> NDArray[np.float64]:
        return np.array([value])

    stages = StageTimes(
        one(forward), one(back_input + weight), one(weight), one(whole), one(pp * whole)
    )
    c = Candidates.of(1, pp=pp, vpp=vpp, schedule=SCHEDULES.index(schedule))
    return float((busy_s(stages, one(float(count))) + bubble_s(stages, c))[0])


def simulated_s(
    schedule: Schedule, pp: int, chunks: int, count: int, times: tuple[float, ...]
) -> float:
    costs = Costs.even(pp * chunks, *(part / chunks for part in times))
    return simulate(build(schedule, pp, chunks, count), schedule, pp, costs).makespan_s


@pytest.mark.parametrize("times", [EVEN, LLAMA])
@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(("schedule", "vpp"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3)])
def test_exact_for_the_classic_schedules(
    schedule: Schedule, vpp: int, pp: int, rounds: int, times: tuple[float, ...]
) -> None:
    count = rounds * pp
    expected = simulated_s(schedule, pp, vpp, count, times)
    assert closed_s(schedule, pp, vpp, count, times) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("times", [EVEN, LLAMA, (1.0, 1.5, 0.5)])
@pytest.mark.parametrize("pp", [4, 8])
@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_within_5_percent_for_the_v_schedules(
    schedule: Schedule, pp: int, times: tuple[float, ...]
) -> None:
    expected = simulated_s(schedule, pp, 2, 4 * pp, times)
    assert closed_s(schedule, pp, 1, 4 * pp, times) == pytest.approx(expected, rel=0.05)


def test_published_order_of_bubbles() -> None:
    """Zero-bubble paper, table 4: 1F1B waits longest, ZB-1p less, ZB-2p not at all."""
    seconds = [closed_s(name, 8, 1, 32, EVEN) for name in ("1f1b", "zb1p", "zb2p")]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 3


def forwards(pp: int, chunks: int, count: int, group: int) -> list[list[Action]]:
    """Forwards where `group` micro-batches go through a chunk before the next does (Megatron's
    `microbatch_group_size_per_vp_stage`)."""
    rounds = [
        (chunk, micro_batch)
        for begin in range(0, count, group)
        for chunk in range(chunks)
        for micro_batch in range(begin, begin + group)
    ]
    return [[Action("forward", chunk * pp + rank, m) for chunk, m in rounds] for rank in range(pp)]


def test_groups_smaller_than_the_pipeline_add_bubbles() -> None:
    """Case 35 (Megatron-LM#1829): the first rank waits for its second chunk's first input."""
    costs = Costs.even(8, 0.5, 0.5, 0.5)
    usual, small = (
        simulate(forwards(4, 2, 16, group), "interleaved", 4, costs).makespan_s for group in (4, 2)
    )
    assert usual == pytest.approx((16 * 2 + 3) * 0.5)
    assert small > 1.3 * usual
