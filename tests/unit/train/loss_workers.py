"""The head and the loss over a vocabulary that two gloo ranks share."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.train.comm import Axis, Clock
from meshwright.train.loss import IGNORE, HeadLoss

TIMEOUT_S = 60
VOCAB, HIDDEN, BATCH, SEQ = 12, 8, 2, 7
CASES = [(chunk, scale) for chunk in (0, 1, 4, 5, 14, 100) for scale in (1.0, 1024.0)]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """x [batch, seq, hidden], the head [vocab, hidden], and targets, some of which do not count."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(BATCH, SEQ, HIDDEN, generator=draw)
    weight = torch.randn(VOCAB, HIDDEN, generator=draw)
    targets = torch.randint(VOCAB, (BATCH, SEQ), generator=draw)
    targets[0, 2:5] = targets[1, -1] = IGNORE
    return x, weight, targets


def loss_and_gradients(
    how: HeadLoss, x: Tensor, weight: Tensor, targets: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the gradients of x and weight over `scale`, as a step asks for them."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = how(x, weight, targets, scale)
    loss.backward(torch.full_like(loss, scale))
    assert x.grad is not None and weight.grad is not None
    return loss.detach(), x.grad / scale, weight.grad / scale


def on_two_ranks(folder: Path) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """`CASES` with half of the vocabulary on each rank; by rank."""
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["meshwright.train.loss"])  # this folder is not on its path
    ranks = [start.Process(target=_rank, args=(folder, rank)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(TIMEOUT_S)
    finally:
        for process in ranks:
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def _rank(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=timeout)
    tp = Axis((0, 1), rank, dist.group.WORLD, Clock())
    x, weight, targets = inputs()
    mine = weight.chunk(2)[rank]
    found = [
        loss_and_gradients(HeadLoss(tp, chunk), x, mine, targets, scale) for chunk, scale in CASES
    ]
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
