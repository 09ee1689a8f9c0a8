"""The slice of a torus that a number of chips makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from meshwright.base.errors import ConfigError
from meshwright.catalog.schema import TopologyEntry


def slice_shape(
    entry: TopologyEntry, steps: int, ref: str
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Extents of the roundest slice of `steps` units, and which of them close into rings; nothing
    for what is no torus. Raises ConfigError if no box of the pod holds just that many."""
    if not entry.shape:
        return (), ()
    if steps >= prod(entry.shape):
        shape = tuple(entry.shape)
    else:
        found = min(_boxes(entry.shape, steps), key=lambda box: (sum(box), box), default=None)
        if found is None:
            fix = f"no box of a {_times(entry.shape)} torus holds {steps}{_nearest(entry, steps)}"
            raise ConfigError("cluster", ref, fix)
        shape = found
    return shape, tuple(extent > 2 and extent % entry.wrap_every == 0 for extent in shape)


def _boxes(limits: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `count` as a product of extents within `limits`."""
    if len(limits) == 1:
        if count <= limits[0]:
            yield (count,)
        return
    for extent in range(1, min(limits[0], count) + 1):
        if count % extent == 0:
            for rest in _boxes(limits[1:], count // extent):
                yield (extent, *rest)


def _nearest(entry: TopologyEntry, steps: int) -> str:
    near = (count for count in range(steps, 0, -1) if any(True for _ in _boxes(entry.shape, count)))
    return f"; ask for {next(near)}"


def _times(shape: Sequence[int]) -> str:
    return " x ".join(str(extent) for extent in shape)
