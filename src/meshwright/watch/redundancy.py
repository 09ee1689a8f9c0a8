"""What keeping the state of ranks elsewhere has taken of a run, beside what was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.base.events import Kind

_MB = 1e6


def redundancy(events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Of the newest incarnation: `predicted`, and `measured` on the members that report (the most
    that one holds for others, the most that one sends in a step, the mean seconds of a step of the
    slowest); None for a run that nobody keeps."""
    starts = [i for i, event in enumerate(events) if event.get("kind") == Kind.RUN_STARTED]
    recent = events[starts[-1] :] if starts else events
    predicted = recent[0].get("redundancy") if recent else None
    reports = [event for event in recent if event.get("kind") == Kind.REDUNDANCY]
    if not predicted:
        return None
    kinds = sorted({str(report.get("kind_of")) for report in reports})
    ranks = [report for report in reports if report.get("rank", -1) >= 0]
    measured = {
        "kinds": kinds,
        "host_bytes": _most(reports, "bytes"),
        "wire_bytes": _most(ranks, "wire_bytes"),
        "seconds": _slowest(ranks),
    }
    return {"predicted": predicted, "measured": measured if ranks else None}


def redundancy_words(found: Mapping[str, Any]) -> str:
    """One line for a person."""
    predicted, measured = found["predicted"], found["measured"]
    told = f"{predicted['kind']}, survives the loss of {predicted['survives']}"
    columns = (
        ("host_bytes", _MB, "MB held"),
        ("wire_bytes", _MB, "MB a step"),
        ("seconds", 1e-3, "ms a step"),
    )
    for key, unit, name in columns:
        now = "-" if measured is None else f"{measured[key] / unit:.3g}"
        told += f"; {name}: {now}, predicted {predicted[key] / unit:.3g}"
    return told


def _most(reports: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(max((report.get(key, 0) for report in reports), default=0))


def _slowest(reports: Sequence[Mapping[str, Any]]) -> float:
    by_rank: dict[int, list[float]] = {}
    for report in reports:
        by_rank.setdefault(report["rank"], []).append(report["seconds"])
    return max((sum(found) / len(found) for found in by_rank.values()), default=0.0)
