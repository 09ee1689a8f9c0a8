"""Chance without state: numbers that follow from a seed and a place, in any order they are asked.

A counter of random events, such as memory errors, is a function of how many were to be expected so
far; it never falls, and whoever asks anew finds the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

_GOLDEN, _FIRST, _SECOND = (
    np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_LEAF = 0.25  # events that are to be expected in the smallest stretch that is told apart
_LEVELS = 16  # halvings from a stretch that is drawn as a whole down to the smallest
_BITS = 64  # up to so many events are shared out one by one


def mix(*parts: Words | int) -> Words:
    """One word that follows from all `parts` (splitmix64, Steele, Lea and Flood 2014)."""
    word: Words = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            word = (word ^ np.asarray(part).astype(np.uint64)) + _GOLDEN
            word = (word ^ (word >> np.uint64(30))) * _FIRST
            word = (word ^ (word >> np.uint64(27))) * _SECOND
            word = word ^ (word >> np.uint64(31))
    return word


def uniform(*parts: Words | int) -> Floats:
    """In [0, 1)."""
    return (mix(*parts) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(*parts: Words | int) -> Floats:
    """Mean 0, deviation 1 (Box and Muller)."""
    first, second = uniform(*parts, 1), uniform(*parts, 2)
    return np.sqrt(-2.0 * np.log1p(-first)) * np.cos(2.0 * np.pi * second)


def leaves(keys: Words, expected: Floats) -> Words:
    """Which of the smallest stretches counters are in; their values change with that alone. Each
    counter enters the next one at another moment."""
    found: Words = (expected / _LEAF + uniform(keys, 0)).astype(np.uint64)
    return found


def arrivals(keys: Words, leaf: Words) -> Floats:
    """How many events each of several Poisson processes `keys` has had before a stretch.

    The events of a long stretch are drawn at once and shared out between halves of halves, each by
    fair coins, which makes every stretch Poisson; so a place in it takes `_LEVELS` throws.
    """
    before, found = np.zeros(len(keys)), np.flatnonzero(leaf)
    if len(found):
        before[found] = _before(keys[found], leaf[found])
    return before


def _before(keys: Words, leaf: Words) -> Floats:
    whole = leaf >> np.uint64(_LEVELS)
    before, here = np.zeros(len(keys)), _drawn(keys, whole)
    for earlier in range(int(whole.max())):
        passed = whole > earlier
        before[passed] += _drawn(keys[passed], np.full(int(passed.sum()), earlier, np.uint64))
    for level in range(_LEVELS - 1, -1, -1):
        place = leaf >> np.uint64(level)
        left = _heads(here, keys, place >> np.uint64(1), level)
        right_half = (place & np.uint64(1)).astype(bool)
        before += np.where(right_half, left, 0.0)
        here = np.where(right_half, here - left, left)
    return before


def _drawn(keys: Words, whole: Words) -> Floats:
    """Events of a long stretch: so many that their number is as good as normal."""
    mean = 2.0**_LEVELS * _LEAF
    found: Floats = np.rint(mean + np.sqrt(mean) * normal(keys, whole, _LEVELS))
    return found


def _heads(coins: Floats, keys: Words, place: Words, level: int) -> Floats:
    """How many of so many coins show heads: counted where few, else as the normal they tend to."""
    bits = mix(keys, place, level)
    few = coins <= _BITS
    shown = np.where(few, np.maximum(coins, 1.0), 1.0).astype(np.uint64)
    heads = np.where(coins > 0, _ones(bits >> (np.uint64(_BITS) - shown)), 0.0)
    if not few.all():
        many = np.rint(coins / 2 + np.sqrt(coins) / 2 * normal(bits))
        heads = np.where(few, heads, np.clip(many, 0.0, coins))
    return heads


def _ones(words: Words) -> Floats:
    """Bits that are set."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), 8)
    found: Floats = np.unpackbits(octets, axis=1).sum(axis=1).astype(np.float64)
    return found
