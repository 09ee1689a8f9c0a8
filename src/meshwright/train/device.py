"""The chip a worker computes on, and its peak."""

from __future__ import annotations

import os
import time

import torch

_SIZE = 1024
_TRIALS = 5


def threads_per_worker(world: int) -> int:
    """CPU threads for each of `world` workers on the cores this process may use."""
    return max(1, _cores() // world)


def measure_peak_flops(dtype: torch.dtype, world: int) -> float:
    """Dense FLOP/s of one of `world` workers: the best of a few 1024-cubed products.

    Run it while the other workers wait, with the threads that training will use. Where workers
    outnumber cores, a worker's peak is its share of all cores.
    """
    a = torch.randn(_SIZE, _SIZE).to(dtype)
    a @ a
    best_s = min(_time_product(a) for _ in range(_TRIALS))
    cores_each = _cores() / world
    return 2 * _SIZE**3 / best_s * min(1.0, cores_each)


def _cores() -> int:
    """Cores that this process may use; a task set or a container may hold it to a few."""
    return len(os.sched_getaffinity(0))


def _time_product(a: torch.Tensor) -> float:
    start = time.perf_counter()
    a @ a
    return time.perf_counter() - start
