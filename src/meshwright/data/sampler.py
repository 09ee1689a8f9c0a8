"""The stateless sampler: sample k of a run is a pure function of (seed, k).

So any number of ranks, workers or restarts reads the same sequence, and the position in the data
is one integer. Epoch k // n visits each of n samples once, in an order of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
_LEAST_HALF_BITS = 3  # smaller networks are measurably uneven
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_index(seed: int, k: int, n: int) -> int:
    """Which of n samples is number k: a bijection of each epoch [e·n, (e+1)·n) onto [0, n)."""
    return int(sample_indices(seed, np.array([k]), n)[0])


def sample_indices(seed: int, ks: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.int64]:
    """`sample_index` of every k in `ks` [m], as int64 [m]; k >= 0, n >= 1, 0 <= seed < 2**64.

    A balanced Feistel network permutes the smallest 2**(2b) >= n, 64 at least; values outside
    [0, n) are sent through again until they land inside ("cycle walking": Black & Rogaway, Ciphers
    with Arbitrary Finite Domains, 2002), which keeps it a bijection. At most 4 passes on average
    for n > 16.
    """
    if n < 1 or (ks.size and int(ks.min()) < 0):
        raise ValueError(f"sample numbers must be >= 0 and n ({n}) >= 1")
    epochs, positions = np.divmod(ks.astype(np.uint64), np.uint64(n))
    one = not ks.size or epochs.min() == epochs.max()  # as a rule; keys are half of the work
    keys = _round_keys(seed, epochs[:1] if one else epochs)
    half_bits = np.uint64(max(_LEAST_HALF_BITS, ((n - 1).bit_length() + 1) // 2))
    values = _permute(positions, keys, half_bits)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = _permute(values[outside], keys if one else keys[:, outside], half_bits)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)


def derived_seed(seed: int, salt: int) -> int:
    """A seed for part `salt` >= 0 of what `seed` governs, unrelated to those of other parts."""
    return int(_mix(_mix(np.array([seed], np.uint64)) ^ _mix(np.array([salt + 1], np.uint64)))[0])


def _permute(
    values: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64], half_bits: np.uint64
) -> npt.NDArray[np.uint64]:
    """One pass of the network over `values` [m] of 2 x half_bits bits; keys [_ROUNDS, m or 1]."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half_bits) | right


def _round_keys(seed: int, epochs: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Independent keys of each round and epoch, [_ROUNDS, m]."""
    epoch_key = _mix(_mix(np.full_like(epochs, seed)) + epochs)
    rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None]
    return _mix(epoch_key + rounds * _GOLDEN)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea & Flood 2014), wrapping modulo 2**64."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
