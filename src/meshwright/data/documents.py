"""Rows with the document of each token, for trainers that want it told and not derived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.data.mixture import Draws
from meshwright.data.order import MixedRows, Order
from meshwright.data.packing import PAD, PackedBatch


@dataclass(frozen=True)
class WithDocuments:
    """`rows` as packed batches, in the same order and with the same state; for a `BatchReader`."""

    rows: MixedRows

    @property
    def order(self) -> Order:
        """Which sample is which."""
        return self.rows.order

    @property
    def at_once(self) -> int:
        """See `order.MixedRows`."""
        return self.rows.at_once

    def read_at(self, draws: Draws) -> PackedBatch:
        """Samples that `order.at` has found already; those that are bad are of no document."""
        tokens = self.rows.read_at(draws)
        documents = np.empty(tokens.shape, dtype=np.int32)
        for source in np.unique(draws.source):
            mine = draws.source == source
            documents[mine] = self.rows.sources[source].documents(draws.number[mine])
        documents[tokens[:, 0] == PAD] = -1
        return PackedBatch(tokens, documents)

    def state(self, k: int) -> dict[str, Any]:
        """See `order.Position`."""
        return self.rows.state(k)

    def position_of(self, state: dict[str, Any]) -> int:
        """See `order.Position`."""
        return self.rows.position_of(state)
