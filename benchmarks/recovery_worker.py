"""One rank of a script that others keep alive: DDP with checkpoints, or torchft.

Each committed step is a line in FOLDER/rank-R.jsonl: `step`, `pid`. At the end each rank writes the
hash of its weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers import mean_loss
from torch import Tensor, nn
from workload import Load, batches, build_job, plain_adamw, plain_model

from meshwright.plan.layout import Layout

LOAD = Load("tiny", global_batch=4, seq_len=128)
CHECKPOINT_EVERY = 10
_ACTIVE = 2  # ranks that a batch is split over
_RANK = int(os.environ["RANK"])


def ddp(folder: Path, steps: int) -> nn.Module:
    """As tutorials have it: DistributedDataParallel, and a checkpoint every tenth step."""
    dist.init_process_group("gloo")
    model, optimizer = _fresh()
    parallel = nn.parallel.DistributedDataParallel(model)
    saved = folder / "checkpoint.pt"
    first = _load(saved, model, optimizer) if saved.exists() else 0
    tokens = batches(LOAD, steps)
    for step in range(first + 1, steps + 1):
        loss = mean_loss(parallel, tokens[step - 1, _RANK::_ACTIVE])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        _tell(folder, step)
        if _RANK == 0 and step % CHECKPOINT_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
    return model


def torchft(folder: Path, steps: int, wrapped: bool, heartbeat_ms: int) -> nn.Module:
    """A replica group of torchft: two of three are active, the third a spare that computes too.

    `wrapped`: by its DistributedDataParallel; else gradients are averaged by `Manager.allreduce`.
    """
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.manager import WorldSizeMode

    model, plain = _fresh()
    kind: Any = vars(dist)["TCPStore"]  # not in the list of what the module exports
    store = kind("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=_ACTIVE,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica{_RANK}",
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(milliseconds=heartbeat_ms),
        timeout=timedelta(seconds=10),
    )
    optimizer: Any = Optimizer(manager, plain)
    run: Callable[..., Any] = DistributedDataParallel(manager, model) if wrapped else model
    tokens = batches(LOAD, steps)
    while (step := manager.current_step()) < steps:
        optimizer.zero_grad()
        manager.wait_quorum()
        place = manager.participating_rank() or 0  # a spare computes, and its share does not count
        logits = run(tokens[step, place::_ACTIVE, :-1])
        wanted = tokens[step, place::_ACTIVE, 1:]
        nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
        if not wrapped:
            _average(manager, model)
        optimizer.step()
        if manager.current_step() > step:
            _tell(folder, manager.current_step())
    return model


def _average(manager: Any, model: nn.Module) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


def _fresh() -> tuple[nn.Module, torch.optim.AdamW]:
    job = build_job(LOAD, Layout(), 1)
    model = plain_model(job.model)
    return model, plain_adamw(model.parameters(), job.optimizer)


def _load(saved: Path, model: nn.Module, optimizer: torch.optim.AdamW) -> int:
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _tell(folder: Path, step: int) -> None:
    line = json.dumps({"step": step, "pid": os.getpid()})
    with (folder / f"rank-{_RANK}.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    progress = os.environ.get("MESHWRIGHT_PROGRESS")
    if progress:
        Path(progress).write_text(str(step), encoding="utf-8")


def _hash(parameters: list[Tensor]) -> str:
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)
    return hashlib.sha256(bits).hexdigest()[:16]


def main() -> None:
    """Train as told by the command line and the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["ddp", "torchft-ddp", "torchft"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--heartbeat-ms", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.kind == "ddp":
        model = ddp(options.folder, options.steps)
    else:
        wrapped = options.kind == "torchft-ddp"
        model = torchft(options.folder, options.steps, wrapped, options.heartbeat_ms)
    bits = _hash(list(model.parameters()))
    (options.folder / f"weights-{_RANK}").write_text(bits, encoding="utf-8")
    os._exit(0)  # threads of libraries have nothing more to say


if __name__ == "__main__":
    main()
