"""Chips that are not used again, as a run's own record tells a later conductor: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.base.events import Kind


def quarantined(events: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    """Members of the incarnation that is under way whose chips were given up."""
    found: set[int] = set()
    for event in events:
        if event["kind"] == Kind.RUN_STARTED and not event.get("adopted"):
            found.clear()  # members are numbered anew
        elif event["kind"] == Kind.QUARANTINED and event["member"] is not None:
            found.add(event["member"])
    return frozenset(found)
