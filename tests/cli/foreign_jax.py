"""A JAX script with several processes: data parallel over them, a checkpoint each step.

`foreign_jax.py FOLDER STEPS [SIGNAL RANK STEP]`, as foreign_ddp.py.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def main() -> None:
    """Train one vector on numbers that follow from the step."""
    folder, steps, *fault = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize()  # finds all that it needs in the environment
    rank, world = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    whole, split = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("ranks",)))
    saved = Path(folder) / "checkpoint.npz"
    weights: np.ndarray[Any, Any] = np.ones(4, np.float32)
    first = 1
    if saved.exists():
        state = np.load(saved)
        first, weights = int(state["step"]) + 1, state["weights"]
    gradient = jax.jit(jax.grad(lambda w, x: jnp.square(x @ w).mean()), out_shardings=whole)
    for step in range(first, int(steps) + 1):
        Path(os.environ["MESHWRIGHT_PROGRESS"]).write_text(str(step))
        if fault[1:] == [str(rank), str(step)] and os.environ["MESHWRIGHT_RESTARTS"] == "0":
            os.kill(os.getpid(), signal.Signals[fault[0]])
        rows = np.random.default_rng(step).normal(size=(2 * world, 4)).astype(np.float32)
        mine = rows[2 * rank : 2 * rank + 2]
        inputs = jax.make_array_from_process_local_data(split, mine)
        change = gradient(jax.device_put(weights, whole), inputs)
        weights = weights - np.float32(0.05) * np.asarray(change.addressable_data(0))
        if rank == 0:
            with saved.with_suffix(".new").open("wb") as file:
                np.savez(file, step=step, weights=weights)
            saved.with_suffix(".new").replace(saved)
    if rank == 0:
        (Path(folder) / "weights").write_bytes(weights.tobytes())


if __name__ == "__main__":
    main()
