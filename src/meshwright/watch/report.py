"""`report.html`: one file that tells a run and needs nothing else, no network and no script."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from meshwright.base.events import Kind, Metrics
from meshwright.watch.charts import Bar, Reference, Series, line_chart, stacked_bars
from meshwright.watch.chips import draw_layout
from meshwright.watch.formats import duration, ordinary, percent, si
from meshwright.watch.history import Evaluation, JsonObject, RunHistory, read_run
from meshwright.watch.summary import (
    PARTS,
    RankSplit,
    mean_shares,
    nonfinite_steps,
    resumed_steps,
    split_by_rank,
    summary,
)

_EVENT_ROWS = 400
_ENVELOPE = ("ts", "seq", "run", "incarnation", "kind", "rank", "step")
_BAD = (Kind.RANK_LOST, Kind.RUN_FAILED)


@dataclass(frozen=True)
class Tile:
    """One headline number: what it is, the value, and a line that puts it in place."""

    name: str
    value: str
    note: str = ""


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


@dataclass(frozen=True)
class EventRow:
    """One line of the table of events."""

    since_start: str
    when_utc: str
    kind: str
    rank: str
    step: str
    detail: str
    bad: bool


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into `run_dir`, whole or not at all, and return its path.

    Raises InputError if `run_dir` is not a run directory.
    """
    page = render(read_run(run_dir))
    target = run_dir / "report.html"
    draft = run_dir / f".report.{os.getpid()}.html"
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(target)
    finally:
        with suppress(OSError):  # a folder that cannot be written has raised above
            draft.unlink(missing_ok=True)
    return target


def render(history: RunHistory) -> str:
    """The page as HTML. Every text from the run is escaped."""
    environment = Environment(
        loader=PackageLoader("meshwright.watch"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = summary(history)
    splits = split_by_rank(history.profiles)
    return environment.get_template("report.html").render(
        run=figures,
        plan=history.plan,
        tiles=tiles(figures),
        notices=notices(history),
        loss=_loss_figure(history),
        speed=_speed_figures(history.metrics),
        split=_split_figure(splits),
        split_words=_split_words(splits),
        chips=draw_layout(history.plan.ranks) if history.plan else None,
        events=event_rows(history.events),
        hidden_events=max(0, len(_told_events(history.events)) - _EVENT_ROWS),
        job_text=history.job_text,
    )


def tiles(run: dict[str, Any]) -> list[Tile]:
    """The headline numbers from a `summary`."""
    ranks = f"{run['ranks']} chip" + ("s" if run["ranks"] != 1 else "")
    per_chip = run["tokens_per_s_per_chip"]
    return [
        Tile(
            "Training loss", _loss(run["train_loss"]), f"step {run['step']:,} of {run['steps']:,}"
        ),
        _validation_tile(run["validation"]),
        Tile(
            "Tokens per second",
            _or_dash(run["tokens_per_s"], si),
            f"median; {si(per_chip)} a chip on {ranks}" if per_chip is not None else ranks,
        ),
        Tile("MFU", _or_dash(run["mfu"], percent), _peak_words(run)),
        Tile("Wall time", duration(run["wall_s"]), _resume_words(run["resumed_from"])),
        Tile("Parameters", si(run["model_params"]), f"{run['layout']} on {ranks}"),
    ]


def _validation_tile(validation: dict[str, Any] | None) -> Tile:
    if validation is None:
        return Tile("Validation loss", "—", "not evaluated yet")
    note = f"{validation['verdict']} (step {validation['step']:,})"
    return Tile("Validation loss", _loss(validation["loss"]), note)


def _peak_words(run: dict[str, Any]) -> str:
    if run["peak_flops_per_chip"] is None:
        return f"no peak known for this chip: {run['peak_source'] or 'no plan yet'}"
    return f"of a peak of {si(run['peak_flops_per_chip'])}FLOP/s a chip ({run['peak_source']})"


def _resume_words(steps: Sequence[int]) -> str:
    if not steps:
        return "in one go"
    return "resumed from step " + ", ".join(f"{step:,}" for step in steps)


def _loss(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "—"


def _or_dash(value: float | None, words: Any) -> str:
    return str(words(value)) if value is not None else "—"


def notices(history: RunHistory) -> list[str]:
    """What a reader must know before trusting the numbers."""
    found = []
    if bad := nonfinite_steps(history):
        found.append(
            f"steps whose loss or gradient norm is not finite: {len(bad):,}, first {bad[0]:,}"
        )
    if history.unreadable_lines:
        found.append(f"unreadable lines in the run's records: {history.unreadable_lines:,}")
    return found


def _loss_figure(history: RunHistory) -> Figure | None:
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


def _speed_figures(metrics: Sequence[Metrics]) -> list[Figure]:
    if not metrics:
        return []
    predicted = [(m.step, m.predicted_step_time_s) for m in metrics]
    known = tuple((float(s), p) for s, p in predicted if p is not None)
    times = [Series("measured", tuple((m.step, m.step_time_s) for m in metrics), slot=1)]
    legend: tuple[LegendEntry, ...] = ()
    if known:
        times.append(Series("predicted", known, slot=2, dashed=True))
        legend = (LegendEntry("measured", 1, "line"), LegendEntry("predicted", 2, "dashed"))
    return [
        _single("Tokens per second", ((m.step, m.tokens_per_s) for m in metrics)),
        Figure("Step time, seconds", _adaptive(times, "Step time by step, seconds"), legend),
        _single("Gradient norm before clipping", ((m.step, m.grad_norm) for m in metrics)),
        _single("Learning rate", ((m.step, m.lr) for m in metrics)),
    ]


def _single(title: str, points: Iterable[tuple[float, float]]) -> Figure:
    return Figure(title, _adaptive([Series(title.lower(), tuple(points), slot=1)], title))


def _adaptive(series: Sequence[Series], label: str) -> Markup:
    """From zero; logarithmic where one spike would press all else flat against the axis."""
    values = sorted(v for one in series for _, v in one.points if math.isfinite(v) and v > 0)
    spiky = bool(values) and values[-1] > 8 * values[len(values) // 2]
    return line_chart(series, label=label, log=spiky, from_zero=not spiky)


def _split_figure(splits: Sequence[RankSplit]) -> Figure | None:
    if not splits:
        return None
    bars = [
        Bar(f"rank {split.rank}", tuple(s / max(1, split.steps) for s in split.seconds))
        for split in splits
    ]
    label = "Time of the mean step, by rank"
    legend = tuple(LegendEntry(part, slot, "box") for slot, part in enumerate(PARTS, start=1))
    return Figure(label, stacked_bars(bars, PARTS, label=label), legend)


def _split_words(splits: Sequence[RankSplit]) -> str:
    shares = mean_shares(splits)
    if shares is None:
        return ""
    return ", ".join(f"{part} {percent(s)}" for part, s in zip(PARTS, shares, strict=True))


def event_rows(events: Sequence[JsonObject]) -> list[EventRow]:
    """The newest rows of the table; profiles are in the split, ranks that get ready share a row."""
    start = next((float(e["ts"]) for e in events if "ts" in e), 0.0)
    return [_event_row(event, start) for event in _told_events(events)[-_EVENT_ROWS:]]


def _told_events(events: Sequence[JsonObject]) -> list[JsonObject]:
    told: list[JsonObject] = []
    for event in events:
        kind = event.get("kind")
        if kind == Kind.RANK_READY and told and told[-1].get("kind") == Kind.RANK_READY:
            told[-1] = {**event, "rank": None, "ranks": told[-1].get("ranks", 1) + 1}
        elif kind != Kind.RANK_PROFILE:
            told.append(event)
    return told


def _event_row(event: JsonObject, start: float) -> EventRow:
    ts = float(event.get("ts", start))
    rest = {k: v for k, v in event.items() if k not in _ENVELOPE and v is not None}
    return EventRow(
        since_start=duration(ts - start) if ts > start else "0 s",
        when_utc=datetime.fromtimestamp(ts, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        kind=str(event.get("kind", "unknown")).replace("_", " "),
        rank=_blank_or(event.get("rank")),
        step=_blank_or(event.get("step")),
        detail=", ".join(f"{key} {_plain(value)}" for key, value in rest.items()),
        bad=event.get("kind") in _BAD,
    )


def _blank_or(value: object) -> str:
    return "" if value is None else str(value)


def _plain(value: object) -> str:
    return ordinary(value) if isinstance(value, float) else str(value)
