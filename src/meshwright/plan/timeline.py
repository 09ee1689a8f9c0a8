"""A schedule in simulated time: step time, idle time and activations in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from meshwright.base.errors import MeshwrightError
from meshwright.plan.layout import Schedule
from meshwright.plan.schedule import Action, needs, rank_of, result


@dataclass(frozen=True)
class Costs:
    """Seconds that a micro-batch takes on each virtual stage, and from one rank to the next.

    A whole backward takes the sum of its two parts.
    """

    forward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    hop_s: float = 0.0

    @classmethod
    def even(
        cls,
        stages: int,
        forward_s: float = 1.0,
        backward_input_s: float = 1.0,
        backward_weight_s: float = 1.0,
        hop_s: float = 0.0,
    ) -> Self:
        """The same for every one of `stages`."""
        forward, input_part, weight_part = (
            (seconds,) * stages for seconds in (forward_s, backward_input_s, backward_weight_s)
        )
        return cls(forward, input_part, weight_part, hop_s)

    def seconds(self, action: Action) -> float:
        """How long `action` takes."""
        forward, input_part = self.forward_s[action.stage], self.backward_input_s[action.stage]
        weight_part = self.backward_weight_s[action.stage]
        return {
            "forward": forward,
            "backward": input_part + weight_part,
            "backward_input": input_part,
            "backward_weight": weight_part,
        }[action.kind]


@dataclass(frozen=True)
class Span:
    """An action in time, from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What `simulate` found; `spans` are per rank, in order."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan_s(self) -> float:
        """From the start of the first action to the end of the last."""
        return max((spans[-1].end_s for spans in self.spans if spans), default=0.0)

    @property
    def idle_s(self) -> list[float]:
        """Per rank, the part of the makespan in which it does nothing."""
        busy = [sum(span.end_s - span.start_s for span in spans) for spans in self.spans]
        return [self.makespan_s - seconds for seconds in busy]

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time, 0 to 1."""
        whole = self.makespan_s * len(self.spans)
        return sum(self.idle_s) / whole if whole else 0.0

    @property
    def peak_in_flight(self) -> list[int]:
        """Per rank, the most pairs of (stage, micro-batch) between a forward and the end of its
        backward, the weight part included."""
        change = {"forward": 1, "backward": -1, "backward_weight": -1, "backward_input": 0}
        return [
            max(accumulate((change[span.action.kind] for span in spans), initial=0))
            for spans in self.spans
        ]


def simulate(
    orders: Sequence[Sequence[Action]], schedule: Schedule, pp: int, costs: Costs
) -> Timeline:
    """Execute `orders` (one per rank) in simulated time; `costs` says of how many stages.

    A rank does its list in order and waits for what an action needs; sends never block. Raises
    MeshwrightError, naming the actions, where ranks would wait for ever.
    """
    stages = len(costs.forward_s)
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    progressed = True
    while progressed:
        progressed = False
        for order, past in zip(orders, spans, strict=True):
            while len(past) < len(order):
                action = order[len(past)]
                before = needs(action, stages)
                if any(need not in ended for need in before):
                    break
                start = past[-1].end_s if past else 0.0
                for need in before:
                    here = rank_of(need.stage, schedule, pp) == rank_of(action.stage, schedule, pp)
                    start = max(start, ended[need] + (0.0 if here else costs.hop_s))
                past.append(Span(action, start, start + costs.seconds(action)))
                ended[result(action)] = past[-1].end_s
                progressed = True
    both = zip(orders, spans, strict=True)
    stuck = [order[len(past)] for order, past in both if len(past) < len(order)]
    if stuck:
        raise MeshwrightError(f"{schedule} over {pp} ranks waits for ever at {stuck}")
    return Timeline(tuple(tuple(past) for past in spans))
