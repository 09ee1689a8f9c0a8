"""A PyTorch script as the tutorials have it: DDP on gloo, AdamW, a checkpoint every fifth step.

`foreign_ddp.py FOLDER STEPS [SIGNAL RANK STEP]`: the signal is for itself, in the first
incarnation. Writes the weights' bits at the end.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train a small network on numbers that follow from step and rank."""
    folder, steps, *fault = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saved = Path(folder) / "checkpoint.pt"
    first = load(saved, net, optimizer)
    for step in range(first, int(steps) + 1):
        Path(os.environ["MESHWRIGHT_PROGRESS"]).write_text(str(step))
        if fault[1:] == [str(rank), str(step)] and os.environ["MESHWRIGHT_RESTARTS"] == "0":
            os.kill(os.getpid(), signal.Signals[fault[0]])
        draw = torch.Generator().manual_seed(1000 * step + rank)
        loss = model(torch.randn(8, 16, generator=draw)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
    if rank == 0:
        bits = b"".join(weight.detach().numpy().tobytes() for weight in net.parameters())
        (Path(folder) / "weights").write_bytes(bits)
    dist.destroy_process_group()


def load(saved: Path, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step to begin with."""
    if not saved.exists():
        return 1
    state: dict[str, Any] = torch.load(saved)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]) + 1


if __name__ == "__main__":
    main()
