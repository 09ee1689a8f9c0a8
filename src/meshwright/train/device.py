"""The chip a worker computes on, and its peak."""

from __future__ import annotations

import os
import time

import torch

_SIZE = 1024
_GPU_SIZE = 8192
_TRIALS = 5


def threads_per_worker(world: int) -> int:
    """CPU threads for each of `world` workers on the cores this process may use."""
    return max(1, _cores() // world)


def pick_device(rank: int, world: int) -> torch.device:
    """The chip of worker `rank`: a GPU of its own where there are as many, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= world:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def backend_for(device: torch.device) -> str:
    """The library that carries collectives: NCCL between GPUs (and gloo for what lies on the
    host), gloo between CPUs."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def measure_peak_flops(dtype: torch.dtype, device: torch.device, world: int) -> float:
    """Dense FLOP/s of one of `world` workers: the best of a few large square products.

    Run it while the other workers wait, with the threads that training will use. Where workers
    outnumber cores, a worker's peak is its share of all cores.
    """
    size = _GPU_SIZE if device.type == "cuda" else _SIZE
    a = torch.randn(size, size, device=device).to(dtype)
    _time_product(a)
    best_s = min(_time_product(a) for _ in range(_TRIALS))
    cores_each = 1.0 if device.type == "cuda" else _cores() / world
    return 2 * size**3 / best_s * min(1.0, cores_each)


def _cores() -> int:
    """Cores that this process may use; a task set or a container may hold it to a few."""
    return len(os.sched_getaffinity(0))


def _time_product(a: torch.Tensor) -> float:
    synchronise(a.device)
    start = time.perf_counter()
    a @ a
    synchronise(a.device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    """Wait until `device` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
