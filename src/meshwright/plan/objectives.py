"""What is best: the fastest, the cheapest, the soonest for its money, the one with most room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from meshwright.catalog import Cluster
from meshwright.plan.goodput import Bill, Reliability, bill
from meshwright.plan.layout import Layout
from meshwright.plan.prediction import layout_of
from meshwright.plan.search import Found, Priced, search
from meshwright.plan.search_front import front
from meshwright.plan.search_notation import write_layout
from meshwright.plan.search_question import Question

Objective = Literal["time", "cost", "goodput", "memory"]
MOST_SPARES = 4  # chips held ready for each 64


@dataclass(frozen=True)
class Choice:
    """A layout on a cluster with spares: days, dollars and risk of a whole run."""

    question: Question
    layout: Layout
    step_time_s: float
    oom_probability: float
    bill: Bill

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "cluster": self.question.cluster.name,
            "name": write_layout(self.layout),
            "layout": self.layout.model_dump(),
            "step_time_s": self.step_time_s,
            "oom_probability": self.oom_probability,
            **self.bill.document(),
        }


def ranked(found: Found, objective: Objective) -> Priced:
    """What was found, the best first. On one cluster the fastest is the cheapest too, and the one
    whose days x dollars are least; `memory` prefers the least memory, of all within a quarter of
    the fastest."""
    best = found.best
    if objective == "memory":
        return best.take(np.lexsort((best.step_s, best.memory_bytes)))
    return best


def choices(questions: Sequence[Question], tokens: float, how: Reliability) -> list[Choice]:
    """What nothing beats in days, dollars and risk at once, over clusters of several sizes, their
    layouts and numbers of spares; the soonest first."""
    every: list[Choice] = []
    for question in questions:
        best = search(question).best
        for index in front(best.step_s, best.risk):
            speed = question.tokens / float(best.step_s[index])
            for spares in range(MOST_SPARES + 1):
                paid = bill(question, speed, tokens, replace(how, spares=spares))
                every.append(
                    Choice(
                        question,
                        layout_of(question, best.candidates, int(index)),
                        float(best.step_s[index]),
                        float(best.risk[index]),
                        paid,
                    )
                )
    if not every:
        return []
    costs = [
        np.array([choice.bill.days for choice in every]),
        np.array([choice.bill.dollars or choice.question.cluster.chips * choice.bill.days
                  for choice in every]),
        np.round([choice.oom_probability for choice in every], 3),
    ]  # fmt: skip
    return [every[index] for index in front(*costs)]


def best_choice(every: Sequence[Choice], objective: Objective) -> Choice:
    """The one that `objective` wants: least days, dollars, days x dollars, or risk."""

    def value(choice: Choice) -> float:
        days = choice.bill.days
        dollars = choice.bill.dollars or choice.question.cluster.chips * days
        wanted = {"time": days, "cost": dollars, "goodput": days * dollars}
        return wanted.get(objective, choice.oom_probability)

    return min(every, key=value)


def sizes(cluster: Cluster) -> list[int]:
    """`cluster.chips` and its halves of whole nodes, down to a node."""
    found, chips, node = [cluster.chips], cluster.chips, cluster.chips_per_node
    while chips % 2 == 0 and chips // 2 >= node and chips // 2 % node == 0:
        chips //= 2
        found.append(chips)
    return found
