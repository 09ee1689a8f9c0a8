"""Doing the same to many at once: requests to storage far away wait, and reading leaves the GIL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_A = TypeVar("_A")
_B = TypeVar("_B")


def spread(do: Callable[[_A], _B], items: Sequence[_A], at_once: int) -> list[_B]:
    """What `do` gives for each item, `at_once` of them side by side; the first error is raised."""
    if min(at_once, len(items)) < 2:
        return [do(item) for item in items]
    with ThreadPoolExecutor(min(at_once, len(items))) as pool:
        return list(pool.map(do, items))
