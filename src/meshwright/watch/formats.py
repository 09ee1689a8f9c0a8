"""Numbers as people read them. The live view and the report share these."""

from __future__ import annotations

import math
from collections.abc import Sequence

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float) -> str:
    """Three significant digits with an SI prefix: `12.3 k`, `950`; `nan` stays `nan`."""
    if not math.isfinite(value):
        return str(value)
    for size, prefix in _PREFIXES:
        if abs(value) >= 0.9995 * size:
            return f"{_three_digits(value / size)} {prefix}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    whole_digits = len(str(int(abs(value))))
    return f"{value:.{max(0, 3 - whole_digits)}f}"


def size(n_bytes: float) -> str:
    """`1.20 GB`, `950 B`; powers of 1000."""
    number, _, prefix = si(n_bytes).partition(" ")
    return f"{number} {prefix}B"


def duration(seconds: float) -> str:
    """`84 ms`, `12.3 s`, `2 min 05 s`, `3 h 20 min`."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min"


def percent(share: float) -> str:
    """A share of 1 as `41 %`; one decimal below 10 %."""
    if not math.isfinite(share):
        return str(share)
    return f"{share * 100:.1f} %" if abs(share) < 0.0995 else f"{share * 100:.0f} %"


def ordinary(value: float) -> str:
    """A label of an axis or a tool-tip: `0.0003`, `1,200`, `45 k`."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e5:
        return si(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if 0 < abs(value) < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-")
    return f"{value:.4g}"


def layer_range(layers: Sequence[int]) -> str:
    """`layers 0-3`, `layers 0-1, 6-7`, `layer 2`, `no layers`."""
    if not layers:
        return "no layers"
    runs = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in _runs(sorted(set(layers))))
    return f"layer {runs}" if len(layers) == 1 else f"layers {runs}"


def _runs(ascending: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each stretch without a hole."""
    found: list[tuple[int, int]] = []
    for value in ascending:
        if found and found[-1][1] == value - 1:
            found[-1] = (found[-1][0], value)
        else:
            found.append((value, value))
    return found
