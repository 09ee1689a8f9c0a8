"""What a run that survives says of its losses, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.base.events import Kind

_KINDS = frozenset(
    {
        Kind.TAKEOVER_DONE,
        Kind.RESIZED,
        Kind.HANG,
        Kind.STRAGGLER,
        Kind.CORRUPT,
        Kind.QUARANTINED,
        Kind.NODE_BACK,
        Kind.FALSE_ALARM,
        Kind.ALERT,
        Kind.ADVICE,
        Kind.CHECKPOINT_FAILED,
    }
)


def survival_words(event: Mapping[str, Any]) -> str | None:
    """One line for an event of a run that survives; None for any other."""
    kind = event.get("kind")
    if kind not in _KINDS:
        return None
    match kind:
        case Kind.TAKEOVER_DONE:
            return _takeover(event)
        case Kind.RESIZED:
            took = _seconds(event.get("resize_s"))
            return f"goes on as {event.get('after')}, was {event.get('before')}; took {took}"
        case Kind.HANG:
            said = event.get("cause") or f"hung in {event.get('phase')}"
            return f"rank {event.get('rank')} is {said} for {_seconds(event.get('stalled_s'))}"
        case Kind.STRAGGLER:
            ratio = event.get("busy_ratio")
            much = f"{ratio:.2f} times" if isinstance(ratio, float) else "more than"
            return f"rank {event.get('rank')} is slow: {much} the time of its like"
        case Kind.CORRUPT:
            return _corrupt(event)
        case Kind.QUARANTINED:
            return f"{_given_up(event)} is not used again: {event.get('cause')}"
        case Kind.NODE_BACK:
            return f"node {event.get('node')} is there again"
        case Kind.FALSE_ALARM:
            return f"false alarm: rank {event.get('rank')} {event.get('what')}"
        case Kind.CHECKPOINT_FAILED:
            return f"step {event.get('step')} is not safe: {event.get('error')}; training goes on"
        case Kind.ALERT:
            return str(event.get("what"))
        case _:
            return str(event.get("advice"))


def _given_up(event: Mapping[str, Any]) -> str:
    rank, member, node = (event.get(key) for key in ("rank", "member", "node"))
    if rank is not None:
        return f"the chip of rank {rank} on node {node}"
    return f"node {node}" if member is None else f"the chip of spare {member} on node {node}"


def _corrupt(event: Mapping[str, Any]) -> str:
    suspects = event.get("suspects")
    known = isinstance(suspects, list) and len(suspects) == 1
    rank = suspects[0] if isinstance(suspects, list) and known else event.get("rank")
    again = "; the step is done again" if event.get("redo") else ""
    return f"rank {rank}: {event.get('what')}{again}"


def _takeover(event: Mapping[str, Any]) -> str:
    ranks = event.get("ranks")
    names = ", ".join(map(str, ranks)) if isinstance(ranks, list) else "?"
    which = f"rank {names}" if "," not in names else f"ranks {names}"
    lost = event.get("lost_steps")
    steps = "no step lost" if lost == 0 else f"{lost} steps lost"
    took = _seconds(event.get("takeover_s"))
    return f"{which} taken over ({event.get('cause')}) in {took}, {steps}"


def _seconds(value: object) -> str:
    if not isinstance(value, int | float):
        return "?"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
