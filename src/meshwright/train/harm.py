"""What a faulty chip does to numbers, brought about on purpose: see `faults.Fault`."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.train.faults import Fault
from meshwright.train.trainer import Trainer

_BIT = 1 << 29  # of the exponent of a number in fp32


def corrupt(trainer: Trainer, fault: Fault) -> None:
    """Do the harm of `fault`, of kind "corrupt"."""
    group = trainer.data.groups[0]
    match fault.what:
        case "weight":
            flip(group.master, fault.element)
        case "gradient":
            flip(group.grad, fault.element)
        case "rate":
            job = trainer.job
            rates = {"lr": 2 * job.optimizer.lr, "min_lr": 2 * job.optimizer.min_lr}
            changed = job.optimizer.model_copy(update=rates)
            trainer.job = job.model_copy(update={"optimizer": changed})
        case "update":
            _err_once(trainer, group.master, fault.element)


def flip(flat: Tensor, element: int) -> None:
    """Flip the highest bit of the exponent of one element."""
    flat.view(torch.int32)[element] ^= _BIT


def _err_once(trainer: Trainer, master: Tensor, element: int) -> None:
    optimizer = trainer.optimizer
    right = optimizer.step

    def wrong(lr: float, divisor: float = 1.0) -> None:
        right(lr, divisor)
        flip(master, element)
        optimizer.step = right  # type: ignore[method-assign]

    optimizer.step = wrong  # type: ignore[method-assign]
