"""Dropout without state: what is dropped is a function of which number it is, and of nothing else.

So a number is dropped in every layout or in none, and again when a layer is run again.
arXiv 1207.0580.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.train.init import uniform

if TYPE_CHECKING:
    from meshwright.train.nn.passing import Pass


@dataclass(frozen=True)
class Draws:
    """What the masks of a pass depend on, besides layer, place and channel.

    `samples`: int64 [batch], the place of each sequence in the global batch of step `step`; for a
    whole step [micro_batches, batch]. Between the layers this rank has slice `slice_index` of
    `slices` of its sequences (sequence parallelism).
    """

    seed: int
    step: int
    samples: Tensor
    slice_index: int = 0
    slices: int = 1

    def of(self, micro_batch: int, device: torch.device) -> Draws:
        """Those of one micro-batch of the step, on `device`."""
        samples = self.samples[micro_batch].to(device, non_blocking=True)
        return replace(self, samples=samples)


def dropout(x: Tensor, about: Pass, rate: float, name: str) -> Tensor:
    """`x` [batch, seq, hidden] with a share `rate` of its numbers zero and the others larger in
    turn; `x` itself where the pass drops nothing. `name` tells the dropouts of a model apart."""
    draws = about.draws
    if rate == 0 or draws is None:
        return x
    places = about.order.chunk(draws.slices)[draws.slice_index]
    return x.masked_fill(dropped(draws, name, places, x.shape[-1], rate), 0) / (1 - rate)


def dropped(draws: Draws, name: str, places: Tensor, hidden: int, rate: float) -> Tensor:
    """Which numbers are dropped, bool [batch, seq, hidden]; `places` int64 [seq] are those of the
    tokens in their whole sequence, on the device of the result."""
    row = draws.samples.to(places.device)[:, None] * _LONGEST + places
    channels = torch.arange(hidden, device=places.device)
    key = f"dropout/{draws.step}/{name}"
    return uniform(draws.seed, key, row[..., None] * hidden + channels) < rate


_LONGEST = 1 << 26  # more tokens than a sequence has
