"""The table of events of a report: one line for each that tells something by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from meshwright.base.events import Kind
from meshwright.watch.formats import duration, layer_range, ordinary
from meshwright.watch.history import JsonObject
from meshwright.watch.survival import survival_words

_ENVELOPE = ("ts", "seq", "run", "incarnation", "kind", "rank", "step")
_BAD = (
    Kind.RANK_LOST,
    Kind.RUN_FAILED,
    Kind.HANG,
    Kind.CORRUPT,
    Kind.QUARANTINED,
    Kind.CHECKPOINT_FAILED,
)
_FIGURES = (Kind.RANK_PROFILE, Kind.EXPERT_LOAD, Kind.BAD_SAMPLES)  # drawn, not listed


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


def event_rows(events: Sequence[JsonObject]) -> list[EventRow]:
    """The rows of the table, without what figures show. Ranks that get ready share a row, and so do
    steps skipped one after the other and layers whose experts move in one step."""
    start = next((float(e["ts"]) for e in events if "ts" in e), 0.0)
    return [_event_row(together, start) for together in _joined(events)]


def _joined(events: Sequence[JsonObject]) -> list[list[JsonObject]]:
    told: list[list[JsonObject]] = []
    for event in events:
        if event.get("kind") in _FIGURES:
            continue
        if told and _share_a_row(told[-1][-1], event):
            told[-1].append(event)
        else:
            told.append([event])
    return told


def _share_a_row(before: JsonObject, event: JsonObject) -> bool:
    kind, step = event.get("kind"), event.get("step")
    if before.get("kind") != kind:
        return False
    if kind == Kind.STEP_SKIPPED:
        return isinstance(step, int) and before.get("step") == step - 1
    return kind == Kind.RANK_READY or (kind == Kind.EXPERTS_MOVED and before.get("step") == step)


def _event_row(together: Sequence[JsonObject], start: float) -> EventRow:
    event = together[-1]
    ts = float(event.get("ts", start))
    return EventRow(
        since_start=duration(ts - start) if ts > start else "0 s",
        when_utc=datetime.fromtimestamp(ts, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        kind=str(event.get("kind", "unknown")).replace("_", " "),
        rank=_blank_or(event.get("rank")) if len(together) == 1 else "",
        step=_blank_or(event.get("step")),
        detail=_detail(together),
        bad=event.get("kind") in _BAD,
    )


def _detail(together: Sequence[JsonObject]) -> str:
    event, several = together[-1], len(together) > 1
    if told := survival_words(event):
        return told
    match event.get("kind"):
        case Kind.EXPERTS_MOVED:
            return _moved_words(together)
        case Kind.STEP_SKIPPED:
            words = f"gradients overflowed, next loss scale {_plain(event.get('loss_scale'))}"
            return f"{words}; {len(together)} steps in a row" if several else words
        case Kind.BAD_SAMPLE:
            return f"sample {event.get('sample')} left out: {event.get('what')}"
    rest = {k: v for k, v in event.items() if k not in _ENVELOPE and v is not None}
    if several:
        rest["ranks"] = len(together)
    return ", ".join(f"{key} {_plain(value)}" for key, value in rest.items())


def _moved_words(together: Sequence[JsonObject]) -> str:
    """Layers whose experts moved in one step, and the most uneven chips before and after."""
    layers = [layer for event in together if isinstance(layer := event.get("layer"), int)]
    moved = sum(_numbers(together, "moved"))
    before, after = (max(_numbers(together, key), default=math.nan) for key in ("before", "after"))
    return (
        f"{layer_range(layers)}: {moved:g} experts; "
        f"load of the chips, max / mean: {before:.2f} before, {after:.2f} after"
    )


def _numbers(events: Sequence[JsonObject], key: str) -> list[float]:
    return [value for event in events if isinstance(value := event.get(key), int | float)]


def _blank_or(value: object) -> str:
    return "" if value is None else str(value)


def _plain(value: object) -> str:
    return ordinary(value) if isinstance(value, float) else str(value)
