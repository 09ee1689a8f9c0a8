"""Pipeline schedules as data: what each stage does, in which order.

The trainer executes these lists; the planner times them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """Forward or backward of one micro-batch on one stage."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """1F1B: stage `stage` of `stages` runs ahead by the stages after it, then alternates.

    At most `stages - stage` micro-batches are in flight. With one stage this is plain
    gradient accumulation. Source: PipeDream-Flush, arXiv 2006.09503.
    """
    ahead = min(stages - stage - 1, micro_batches)
    forwards = [Action("forward", m) for m in range(micro_batches)]
    backwards = [Action("backward", m) for m in range(micro_batches)]
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[micro_batches - ahead :]
