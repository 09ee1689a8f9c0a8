"""What of a run's time is productive where chips fail, and what days and dollars follow.

Overhead as a share of productive time, with failures at rate `f` of the whole job (1 / its mean
time between failures M), a checkpoint of `delta` seconds every `tau`: delta / tau for writing,
f (restart + tau / 2 + delta) for what is lost with each failure. Productive share: 1 / (1 + both).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from meshwright.checkpoint.interval import daly_interval_s
from meshwright.models.spec import ModelSpec
from meshwright.plan.search_question import Question

DAY_S = 86_400.0
UNIT = 64  # chips that a number of spares is counted for

# 419 unplanned stops in 54 days on 2,048 nodes of 8 H100 (arXiv 2407.21783, table 5).
FAILURES_PER_NODE_DAY = 419 / (54 * 2048)
# Stop, replace the node, start processes, read the checkpoint: 15 to 30 minutes on 2,304 GPUs;
# under 2 with nodes that stand ready and no checkpoint to read (AWS HyperPod, re:Invent AIM3338).
RESTART_S = 900.0
TAKEOVER_S = 120.0
REPAIR_S = 4 * 3600.0  # assumed: until a failed node is back among the spares
CHECKPOINT_BYTES = 14.0  # of a parameter: bf16 weights, fp32 master copy and two moments


@dataclass(frozen=True)
class Reliability:
    """How often nodes fail, and what that costs. `spares` are chips held ready for each 64."""

    failures_per_node_day: float = FAILURES_PER_NODE_DAY
    restart_s: float = RESTART_S
    takeover_s: float = TAKEOVER_S
    repair_s: float = REPAIR_S
    spares: int = 0


@dataclass(frozen=True)
class Goodput:
    """`share` of wall time that makes progress; `interval_s` between checkpoints; seconds of a
    write, of a mean restart; hours between failures; spare chips in all."""

    share: float
    interval_s: float
    write_s: float
    restart_s: float
    mtbf_h: float
    spare_chips: int

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return dict(vars(self))


def goodput(question: Question, how: Reliability, beside_params: float = 0.0) -> Goodput:
    """What share of a run on the cluster is productive. `beside_params` are trained beside the
    model, such as those of an encoder."""
    cluster = question.cluster
    rate = max(cluster.nodes * how.failures_per_node_day / DAY_S, 1e-12)
    speed = cluster.storage_bytes_s_per_node
    write_s = checkpoint_s(question.spec, cluster.nodes, speed, beside_params)
    spare_chips = spares_of(cluster.chips, how.spares)
    # A spare takes over; where all of them are under repair, the run starts anew.
    held = spare_chips // cluster.chips_per_node
    missing = _more_than(held, rate * how.repair_s)
    restart_s = (1 - missing) * how.takeover_s + missing * how.restart_s
    interval_s = max(daly_interval_s(write_s, 1 / rate), write_s, 1.0)
    overhead = write_s / interval_s + rate * (restart_s + interval_s / 2 + write_s)
    return Goodput(1 / (1 + overhead), interval_s, write_s, restart_s, 1 / rate / 3600, spare_chips)


def checkpoint_s(
    spec: ModelSpec, nodes: int, storage_bytes_s_per_node: float, beside_params: float = 0.0
) -> float:
    """Seconds of writing all state once, every node its share; training waits."""
    size = (spec.params + beside_params) * CHECKPOINT_BYTES
    return size / (nodes * storage_bytes_s_per_node)


def spares_of(chips: int, per_unit: int) -> int:
    """Chips held ready beside `chips`."""
    return math.ceil(chips / UNIT * per_unit)


def _more_than(held: int, mean: float) -> float:
    """Probability that, of failures arriving at random with `mean` in a repair time, more than
    `held` are open: the spares are used up when another node fails. Without spares: always."""
    if not held:
        return 1.0
    below, term = 0.0, math.exp(-mean)
    for count in range(held):
        below += term
        term *= mean / (count + 1)
    return max(0.0, 1.0 - below)


@dataclass(frozen=True)
class Bill:
    """A whole run: days and dollars with what failures cost."""

    tokens: float
    days: float
    dollars: float | None
    goodput: Goodput
    spares: int

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**vars(self), "goodput": self.goodput.document()}


def bill(
    question: Question,
    tokens_per_s: float,
    tokens: float,
    how: Reliability,
    beside_params: float = 0.0,
) -> Bill:
    """What training on `tokens` takes; spares are paid for as well. `beside_params` as of
    `goodput`."""
    good = goodput(question, how, beside_params)
    days = tokens / (tokens_per_s * good.share) / DAY_S
    price = question.cluster.price_per_chip_hour
    chips = question.cluster.chips + good.spare_chips
    dollars = None if price is None else price * chips * days * 24
    return Bill(tokens, days, dollars, good, how.spares)
