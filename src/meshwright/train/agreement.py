"""Ranks that hold the same numbers compare them now and then: a chip that errs says nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.train.fabric.group import FabricGroup
from meshwright.train.optim import Updated
from meshwright.train.trainer import Trainer


@dataclass(frozen=True)
class Disagreement:
    """`ranks` should hold the same; `odd` are those outvoted by most of them, none if it cannot be
    told who is wrong."""

    ranks: tuple[int, ...]
    odd: tuple[int, ...]


def checksum(trainer: Trainer) -> int:
    """See `state_checksum`."""
    return state_checksum(trainer.data.groups, trainer.optimizer.moments)


def state_checksum(groups: Sequence[Updated], moments: Sequence[tuple[Tensor, Tensor]]) -> int:
    """A sum over the bits of all masters and moments: any bit changes it. As much work as to add up
    as many numbers."""
    total = 0
    for group, pair in zip(groups, moments, strict=True):
        for flat in (group.master, *pair):
            total += int(flat.view(torch.int32).sum(dtype=torch.int64))
    return total & (1 << 63) - 1


def gather(world: FabricGroup, mine: int) -> list[int]:
    """Every rank's checksum. Raises Interrupted."""
    everywhere = torch.empty(len(world.ranks), 1, dtype=torch.int64)
    world.all_gather(everywhere, torch.tensor([[mine]])).wait()
    found: list[int] = everywhere.flatten().tolist()
    return found


def disagreements(sums: Sequence[int], twins: Sequence[tuple[int, ...]]) -> list[Disagreement]:
    """Among `twins`, which lists for each rank the others that hold the same."""
    found = []
    for rank, others in enumerate(twins):
        ranks = tuple(sorted((rank, *others)))
        if rank != ranks[0] or len({sums[r] for r in ranks}) == 1:
            continue
        value, votes = Counter(sums[r] for r in ranks).most_common(1)[0]
        most = 2 * votes > len(ranks)
        odd = tuple(r for r in ranks if sums[r] != value) if most else ()
        found.append(Disagreement(ranks, odd))
    return found
