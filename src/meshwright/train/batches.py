"""Which samples a data-parallel rank sees, as tensors of micro-batches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwright.data.held_out import HeldOut
from meshwright.data.order import MixedRows
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout
from meshwright.train.loss import IGNORE
from meshwright.train.mesh import Mesh


def places(count: int, layout: Layout, dp_index: int) -> npt.NDArray[np.int64]:
    """Places among `count` of this rank's sequences, int64 [micro_batches, micro_batch]; `count` is
    a multiple of dp x micro_batch."""
    return np.arange(count).reshape(-1, layout.dp, layout.micro_batch)[:, dp_index]


def step_batches(job: Job, mesh: Mesh, samples: MixedRows, step: int) -> Tensor:
    """Tokens of step `step` (from 0), int64 [micro_batches, micro_batch, seq_len + 1]."""
    batch = job.data.global_batch
    mine = places(batch, job.layout, mesh.dp_index)
    return _shaped(samples.read(step * batch + mine.ravel()), mine)


def held_out_batches(job: Job, mesh: Mesh, held_out: HeldOut) -> Tensor:
    """This rank's share of the evaluation windows, shaped as by `step_batches`.

    Where they do not fill the ranks, sequences whose targets do not count fill up.
    """
    windows = held_out.spread(job.job.eval_sequences)
    unit = job.layout.dp * job.layout.micro_batch
    mine = places(-(-len(windows) // unit) * unit, job.layout, mesh.dp_index)
    tokens = held_out.read(windows[np.minimum(mine, len(windows) - 1)].ravel())
    tokens[mine.ravel() >= len(windows)] = IGNORE
    return _shaped(tokens, mine)


def _shaped(tokens: npt.NDArray[np.int64], mine: npt.NDArray[np.int64]) -> Tensor:
    batches: Tensor = torch.from_numpy(tokens).unflatten(0, mine.shape)
    return batches
