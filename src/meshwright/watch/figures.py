"""The figures of a report, from the history of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from meshwright.base.events import ExpertLoad, Metrics
from meshwright.watch.charts import Bar, Reference, Series, line_chart, stacked_bars
from meshwright.watch.experts import LayerLoads, by_layer, report_steps
from meshwright.watch.heat import Cell, Strip, heat_map, level_names
from meshwright.watch.history import Evaluation, RunHistory
from meshwright.watch.summary import PARTS, RankSplit, resumed_steps


@dataclass(frozen=True)
class LegendEntry:
    """A name beside a swatch of colour slot `slot`; `shape` is `line`, `dot`, `dashed` or `box`."""

    name: str
    slot: int
    shape: str


@dataclass(frozen=True)
class Figure:
    """A drawing under its title and legend."""

    title: str
    drawing: Markup
    legend: tuple[LegendEntry, ...] = ()


def loss_figure(history: RunHistory) -> Figure | None:
    """Training and validation loss against n-gram models; None without a step."""
    if not history.metrics and not history.evaluations:
        return None
    series = [
        Series("training", tuple((m.step, m.loss) for m in history.metrics), slot=1),
        Series("validation", tuple((e.step, e.loss) for e in history.evaluations), 2, dots=True),
    ]
    references = _references(history.evaluations)
    marks = [(float(step), "resumed") for step in resumed_steps(history.events)]
    label = "Loss by step, nats per token"
    legend = [LegendEntry("training", 1, "line"), LegendEntry("validation", 2, "dot")]
    legend += [LegendEntry(r.name, r.slot, "dashed") for r in references]
    drawing = line_chart(series, label=label, references=references, marks=marks)
    return Figure(label, drawing, tuple(legend))


def _references(evaluations: Sequence[Evaluation]) -> list[Reference]:
    if not evaluations:
        return []
    levels = (
        ("bigram", evaluations[-1].bigram_loss, 3),
        ("unigram", evaluations[-1].unigram_loss, 4),
    )
    return [Reference(name, level, slot) for name, level, slot in levels if level is not None]


def speed_figures(metrics: Sequence[Metrics]) -> list[Figure]:
    """Speed, step time, gradient norm and rate by step, and the router loss where there is one."""
    if not metrics:
        return []
    predicted = [(m.step, m.predicted_step_time_s) for m in metrics]
    known = tuple((float(s), p) for s, p in predicted if p is not None)
    times = [Series("measured", tuple((m.step, m.step_time_s) for m in metrics), slot=1)]
    legend: tuple[LegendEntry, ...] = ()
    if known:
        times.append(Series("predicted", known, slot=2, dashed=True))
        legend = (LegendEntry("measured", 1, "line"), LegendEntry("predicted", 2, "dashed"))
    figures = [
        _single("Tokens per second", ((m.step, m.tokens_per_s) for m in metrics)),
        Figure("Step time, seconds", _adaptive(times, "Step time by step, seconds"), legend),
        _single("Gradient norm before clipping", ((m.step, m.grad_norm) for m in metrics)),
        _single("Learning rate", ((m.step, m.lr) for m in metrics)),
    ]
    if any(m.router_loss for m in metrics):
        points = ((m.step, m.router_loss) for m in metrics)
        figures.append(_single("Router loss, added to the loss", points))
    return figures


def _single(title: str, points: Iterable[tuple[float, float]]) -> Figure:
    return Figure(title, _adaptive([Series(title.lower(), tuple(points), slot=1)], title))


def _adaptive(series: Sequence[Series], label: str) -> Markup:
    """From zero; logarithmic where one spike would press all else flat against the axis."""
    values = sorted(v for one in series for _, v in one.points if math.isfinite(v) and v > 0)
    spiky = bool(values) and values[-1] > 8 * values[len(values) // 2]
    return line_chart(series, label=label, log=spiky, from_zero=not spiky)


def split_figure(splits: Sequence[RankSplit]) -> Figure | None:
    """Where the time of each rank went; None without profiles."""
    if not splits:
        return None
    bars = [
        Bar(f"rank {split.rank}", tuple(s / max(1, split.steps) for s in split.seconds))
        for split in splits
    ]
    label = "Time of the mean step, by rank"
    legend = tuple(LegendEntry(part, slot, "box") for slot, part in enumerate(PARTS, start=1))
    return Figure(label, stacked_bars(bars, PARTS, label=label), legend)


def load_figures(loads: Sequence[ExpertLoad], chips: bool) -> list[Figure]:
    """How uneven the experts of each layer were, and with `chips` the chips that share them."""
    if not loads:
        return []
    figures = [_load_figure("Experts of a layer", loads, lambda load: load.imbalance)]
    if chips:
        title = "Chips that share them"
        figures.append(_load_figure(title, loads, lambda load: load.chip_imbalance))
    return figures


def _load_figure(
    title: str, loads: Sequence[ExpertLoad], value: Callable[[ExpertLoad], float]
) -> Figure:
    steps = report_steps(loads)
    strips = [_strip(layer, steps, value) for layer in by_layer(loads)]
    columns = [f"step {step:,}" for step in steps]
    label = f"{title}: max / mean load"
    legend = tuple(LegendEntry(name, n, "heat") for n, name in enumerate(level_names()))
    return Figure(label, heat_map(strips, columns, label=label), legend)


def _strip(layer: LayerLoads, steps: Sequence[int], value: Callable[[ExpertLoad], float]) -> Strip:
    found = (layer.by_step.get(step) for step in steps)
    cells = (Cell(value(load), _load_words(load)) if load else None for load in found)
    return Strip(f"layer {layer.layer}", tuple(cells))


def _load_words(load: ExpertLoad) -> str:
    return (
        f"layer {load.layer}, step {load.step:,}: experts {load.imbalance:.2f}, "
        f"chips {load.chip_imbalance:.2f}, fullest expert {load.hottest}"
    )
