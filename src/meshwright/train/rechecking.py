"""Work that is done again now and then, because a chip that computes wrongly says nothing.

The sample is the three products of a forward and a backward pass over a square of the rank's own
weights, another one each time. The same chip must find the same bits twice, and ranks that hold the
same weights must find the same as each other.
"""

from __future__ import annotations

from math import isqrt

import torch

from meshwright.train.agreement import Finding, bits, gather, outvoted
from meshwright.train.fabric.group import FabricGroup
from meshwright.train.precision.apply import COMPUTE_DTYPES
from meshwright.train.trainer import Trainer

_ROWS, _MOST_COLUMNS = 64, 512
_SPREAD = "; what was computed wrongly before is in the weights of all: checkpoints may hold it too"


def sampled_work(trainer: Trainer, step: int) -> int:
    """A sum over the bits of what the sample of `step` comes to; 0 where a rank has no weights."""
    masters = [group.master for group in trainer.data.groups if group.master.numel()]
    if not masters:
        return 0
    master = masters[step % len(masters)]
    width = min(isqrt(master.numel()), _MOST_COLUMNS)
    first = step * width * width % (master.numel() - width * width + 1)
    dtype = COMPUTE_DTYPES[trainer.mesh.layout.precision]
    weight = master[first : first + width * width].view(width, width).to(dtype)
    seeded = torch.Generator().manual_seed(step)
    x = torch.randn(_ROWS, width, generator=seeded).to(dtype)
    with torch.no_grad():
        y = x @ weight
        return bits((y, y @ weight.T, x.T @ y))


def recheck(trainer: Trainer, twins: FabricGroup | None, step: int) -> Finding | None:
    """What the sample of `step` (done, from 1) says of this rank and its twins, each told by one of
    them; None: nothing. Raises Interrupted."""
    first, again = sampled_work(trainer, step), sampled_work(trainer, step)
    erred = first != again
    if erred:
        what = f"the same products came out otherwise the second time{_SPREAD}"
        return Finding(step, what, (trainer.mesh.rank,), certain=True)
    if twins is None:
        return None
    odd = outvoted(gather(twins, (first,)))
    if odd == ():
        return None
    suspects = twins.ranks if odd is None else tuple(twins.ranks[i] for i in odd)
    told_by = next(i for i in range(len(twins.ranks)) if odd is None or i not in odd)
    if twins.index != told_by:
        return None
    what = f"ranks {list(twins.ranks)} hold the same weights and find other products of them"
    what += _SPREAD
    return Finding(step, what, suspects, certain=odd is not None)
