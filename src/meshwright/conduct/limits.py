"""Every limit of a run out of one setting and what was measured: pure.

`longest_stall_s` is the longest that a run may stand still before something is done about it. All
else follows from it and from how long steps have taken, so that no two limits need to be ordered by
hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from meshwright.base.pulse import Phase

DEFAULT_LONGEST_STALL_S = 30.0
_STEPS_OF_SILENCE = 3.0  # as many of the slowest steps are taken for slow, not for stuck
_LEAST_SILENCE_S = 0.1  # a busy system may keep a healthy process from its core for as long
_ENOUGH_STEPS = 8  # before that the setting alone decides: first steps compile and warm up
_SLOWEST = 0.99


@dataclass(frozen=True)
class Limits:
    """How long what may last, in seconds."""

    longest_stall_s: float
    frozen_s: float  # a process that is stopped (T)
    blocked_s: float  # one held by a debugger (t) or by its disk or file server (D)
    hang_s: float  # a rank that others wait for writes nothing in a step
    evaluate_s: float  # the same between two of its signs of life in an evaluation
    checkpoint_s: float  # in a checkpoint, where one call may write gigabytes
    takeover_s: float  # in a takeover
    start_s: float  # a worker that was started and has not said that it is up
    lease_agent_s: float  # an agent without its conductor stops its ranks
    lease_conductor_s: float  # a conductor without the agent gives its ranks away
    stop_s: float  # workers asked to stop finish their step and save

    def quiet_s(self, phase: Phase) -> float:
        """How long a rank in `phase` may write nothing while others wait; inf for an idle one."""
        match phase:
            case Phase.IDLE:
                return float("inf")
            case Phase.EVALUATE:
                return self.evaluate_s
            case Phase.CHECKPOINT:
                return self.checkpoint_s
            case Phase.TAKEOVER:
                return self.takeover_s
            case _:
                return self.hang_s


def limits(
    longest_stall_s: float = DEFAULT_LONGEST_STALL_S,
    step_times_s: Sequence[float] = (),
    evaluate_quiet_s: float = 0.0,
    checkpoint_s: float = 0.0,
) -> Limits:
    """The limits after steps that took `step_times_s`, the latest of them.

    `evaluate_quiet_s` is the longest silence seen within an evaluation that ended, `checkpoint_s`
    the longest checkpoint. What was measured may make a limit longer than the setting, never
    shorter than the thirtieth part of it: a step that takes a minute is not stuck after half of
    one.
    """
    floor_s = max(longest_stall_s / 30, _LEAST_SILENCE_S)
    if len(step_times_s) < _ENOUGH_STEPS:
        hang_s = max([longest_stall_s, *(_STEPS_OF_SILENCE * time_s for time_s in step_times_s)])
    else:
        hang_s = max(floor_s, _STEPS_OF_SILENCE * quantile(step_times_s, _SLOWEST))
    lease_s = max(longest_stall_s / 3, hang_s)
    return Limits(
        longest_stall_s=longest_stall_s,
        frozen_s=min(max(longest_stall_s / 500, 0.05), 5.0),
        blocked_s=longest_stall_s,
        hang_s=hang_s,
        evaluate_s=max(longest_stall_s, hang_s, _STEPS_OF_SILENCE * evaluate_quiet_s),
        checkpoint_s=max(4 * longest_stall_s, hang_s, _STEPS_OF_SILENCE * checkpoint_s),
        takeover_s=max(longest_stall_s, hang_s),
        start_s=4 * longest_stall_s,
        lease_agent_s=lease_s / 2,  # over, with its ranks stopped, long before anyone else acts
        lease_conductor_s=lease_s,
        stop_s=max(2 * longest_stall_s, hang_s),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]
