"""One predicted step as a Chrome trace (chrome://tracing, Perfetto): a line for each pipeline rank.

The schedule is executed action by action (`plan/timeline.py`) with the seconds that the cost model
gives each stage; what a step does once at its end is added behind it.
"""

from __future__ import annotations

from typing import Any

from meshwright.plan.cost.compute import Passes, embedding_times, head_times
from meshwright.plan.cost.layer import layer_seconds
from meshwright.plan.cost.shapes import Shapes
from meshwright.plan.cost.step import hop_seconds, rates_of
from meshwright.plan.cost.weights import rank_weights
from meshwright.plan.layout import Layout
from meshwright.plan.prediction import candidate, predict
from meshwright.plan.schedule import build
from meshwright.plan.search_question import Question
from meshwright.plan.stages import stage_layers
from meshwright.plan.timeline import Costs, Timeline, simulate

MOST_ROUNDS = 4  # rounds of pp x chunks micro-batches that are drawn; the rest looks the same
US = 1e6

_NAMES = {
    "forward": "F",
    "backward": "B",
    "backward_input": "Bi",
    "backward_weight": "Bw",
}


def trace(question: Question, layout: Layout) -> dict[str, Any]:
    """The trace as JSON. Where a step has very many micro-batches only the first are drawn; the
    metadata say how many."""
    all_of_them = question.global_batch // (layout.dp * layout.micro_batch)
    drawn = min(all_of_them, MOST_ROUNDS * layout.virtual_stages + layout.pp)
    if drawn > layout.pp:
        drawn -= drawn % layout.pp
    timeline = timed(question, layout, drawn)
    parts = predict(question, layout).time_parts
    events = [_process(rank) for rank in range(layout.pp)]
    for rank, spans in enumerate(timeline.spans):
        events += [
            _event(
                f"{_NAMES[span.action.kind]}{span.action.micro_batch}",
                rank,
                span.start_s,
                span.end_s,
                {"stage": span.action.stage, "micro_batch": span.action.micro_batch},
            )
            for span in spans
        ]
        at = timeline.makespan_s
        for name in ("dp", "optimizer", "overhead", "data"):
            events.append(_event(name, rank, at, at + parts[name], {}))
            at += parts[name]
    about = {
        "layout": layout.label,
        "micro_batches": all_of_them,
        "micro_batches_drawn": drawn,
        "predicted_step_time_s": sum(parts.values()),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "metadata": about}


def timed(question: Question, layout: Layout, micro_batches: int) -> Timeline:
    """The schedule in simulated time, with layers as `plan/stages.py` shares them out."""
    orders = build(layout.schedule, layout.pp, layout.chunks, micro_batches)
    return simulate(orders, layout.schedule, layout.pp, stage_costs(question, layout))


def stage_costs(question: Question, layout: Layout) -> Costs:
    """Seconds of each virtual stage for one micro-batch."""
    shapes, c = Shapes.of(question.work), candidate(layout)
    speeds = rates_of(question.work, question.cluster, question.constants)
    layer = layer_seconds(shapes, speeds, c, rank_weights(shapes, c))
    ends = {0: embedding_times(shapes, speeds, c)}
    last = layout.virtual_stages - 1
    head = head_times(shapes, speeds, c)
    ends[last] = ends[last] + head if last in ends else head
    none = embedding_times(shapes, speeds, c).times(0.0)
    forward, inputs, weights = [], [], []
    for stage, count in enumerate(_shared_out(question, layout)):
        extra: Passes = ends.get(stage, none)
        forward.append(float(count * layer.forward_s[0] + extra.forward_s[0]))
        weight = float(count * layer.weight_s[0] + extra.weight_s[0])
        backward = float(count * layer.backward_s[0] + extra.backward_s[0])
        inputs.append(max(backward - weight, 0.0))
        weights.append(min(weight, backward))
    nothing = c.micro_batches(0)
    hops = hop_seconds(shapes, speeds, c, nothing, nothing)
    hop = float(hops[0]) / max(2.0 * (layout.pp - 1), 1.0)
    return Costs(tuple(forward), tuple(inputs), tuple(weights), hop)


def _shared_out(question: Question, layout: Layout) -> list[int]:
    """Layers of each virtual stage: evenly where the framework does so, else by cost."""
    even, rest = divmod(question.spec.layers, layout.virtual_stages)
    if question.framework.even_stages and not layout.stages and not rest:
        return [even] * layout.virtual_stages
    return [len(layers) for layers in stage_layers(question.spec, layout, question.seq_len)]


def _process(rank: int) -> dict[str, Any]:
    name = {"name": f"pipeline rank {rank}"}
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": name}


def _event(
    name: str, rank: int, start_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": 0,
        "tid": rank,
        "ts": start_s * US,
        "dur": (end_s - start_s) * US,
        "args": args,
    }
