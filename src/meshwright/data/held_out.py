"""What a run is evaluated on: the held-out parts of its sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.data.mixture import Mixture
from meshwright.data.opening import Reading, open_tokens
from meshwright.data.windows import JoinedWindows, Windows

HeldOut = Windows | JoinedWindows


def open_held_out(
    prefixes: Sequence[Path | None],
    seq_len: int,
    mixture: Mixture,
    reading: Reading | None = None,
) -> HeldOut:
    """Windows of the stores at `prefixes`, one for each source and None for one without, by the
    shares that they have at the end of the run. Raises DataError."""
    shares = mixture.stages[-1].weights
    found = [
        (Windows(open_tokens(prefix, reading), seq_len), share)
        for prefix, share in zip(prefixes, shares, strict=True)
        if prefix is not None
    ]
    if len(found) == 1:
        return found[0][0]
    whole = sum(share for _, share in found)
    return JoinedWindows([part for part, _ in found], [share if whole else 1 for _, share in found])
