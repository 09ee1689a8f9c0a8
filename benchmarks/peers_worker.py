"""One rank of one peer: warms up, takes timed steps, and writes what it saw as JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from peers import Step, Task, peers
from workload import Load, batches

from meshwright.conduct.protocol import die_with_parent


def run(step: Step, task: Task) -> tuple[list[float], list[float]]:
    """Seconds and global mean loss of every step."""
    mine = batches(task.load, task.steps)[:, task.rank :: task.world].contiguous()
    times: list[float] = []
    losses: list[torch.Tensor] = []
    for number, tokens in enumerate(mine):
        start = time.perf_counter()
        losses.append(step(number, tokens))
        times.append(time.perf_counter() - start)
    total = torch.stack(losses)
    dist.all_reduce(total)
    return times, (total / task.world).tolist()


def versions() -> dict[str, str]:
    """Of the libraries that are here."""
    found = {}
    for name in ("torch", "accelerate", "deepspeed"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Train as told by the command line and the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=list(peers()))
    parser.add_argument("--load", type=json.loads, required=True, help="keys of `Load`")
    parser.add_argument("--steps", type=int, required=True, help="the warm-up included")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    die_with_parent()
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    task = Task(Load(**options.load), options.steps, rank, world)
    with peers()[options.peer](task) as step:
        times, losses = run(step, task)
        if rank == 0:
            found = {"step_s": times, "losses": losses, "versions": versions()}
            options.out.write_text(json.dumps(found), encoding="utf-8")
        os._exit(0)  # taking gloo groups down hangs now and then, Accelerate's for one


if __name__ == "__main__":
    main()
