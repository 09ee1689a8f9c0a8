"""When silence counts: the rule that both ends of a link between conductor and agent go by."""

from __future__ import annotations


def lapsed(now_s: float, renewed_s: float, progress_s: float, lease_s: float) -> bool:
    """Whether a lease is over: not renewed for `lease_s`, and nobody who depends on it got on.

    Both sides of a link judge by it, the agent with the shorter lease: it stops its ranks before
    anyone else takes them for lost.
    """
    return now_s - max(renewed_s, progress_s) > lease_s
