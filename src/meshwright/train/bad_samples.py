"""Samples that a step leaves out because they are damaged: counted alike by all ranks.

Readers give a row of padding for each (`data.tolerant_rows`), so who reads it learns of it from the
batch, and the others by the vote on the step. The count is part of the trainer's state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from meshwright.base.errors import DataError
from meshwright.data.order import MixedRows
from meshwright.data.tolerant_rows import TolerantRows
from meshwright.plan.data_section import DataSection
from meshwright.train.batches import places
from meshwright.train.loss import IGNORE
from meshwright.train.mesh import Mesh

_LINE_BYTES = 512


def count_bad(batches: Tensor, mesh: Mesh) -> int:
    """Of `batches` [micro_batches, micro_batch, seq_len + 1] those that are padding from the start;
    0 on ranks that see what others count."""
    return int(_bad(batches).sum()) if _counts(mesh) else 0


def _counts(mesh: Mesh) -> bool:
    return not any((mesh.at.tp, mesh.at.cp, mesh.at.pp))


def _bad(batches: Tensor) -> Tensor:
    return batches[:, :, 0] == IGNORE


@dataclass
class BadSampleWords:
    """What is wrong with the bad samples of one rank, and when there are too many of all."""

    mesh: Mesh
    rows: MixedRows
    data: DataSection
    last: str = field(default="", init=False)

    def found(self, batches: Tensor, step: int) -> list[tuple[int, str]]:
        """(number in the run, what is wrong) of those of step `step`, from 0, that this rank
        answers for."""
        bad = _bad(batches).numpy()
        if not bad.any() or not _counts(self.mesh):
            return []
        batch = self.data.global_batch
        samples = step * batch + places(batch, self.mesh.layout, self.mesh.dp_index)[bad]
        draws = self.rows.order.at(samples)
        told = [
            (int(sample), self._why(int(source), int(row)))
            for sample, source, row in zip(samples, draws.source, draws.number, strict=True)
        ]
        self.last = told[-1][1]
        return told

    def _why(self, source: int, row: int) -> str:
        rows = self.rows.sources[source]
        why = rows.why.get(row) if isinstance(rows, TolerantRows) else None
        return why or f"row {row} of {rows.store.prefix} is bad"

    def refuse_too_many(self, total: int, step: int) -> None:
        """All ranks: raise DataError, in the same words, if `total` after `step` are more than the
        job allows."""
        allowed = self.data.bad_samples
        if total <= allowed:
            return
        said = f"step {step}: {self._said_by_anyone()}"
        if allowed:
            said += f"; {total} bad samples, data.bad_samples = {allowed} are allowed"
        else:
            said += ", or let the run go on without some: data.bad_samples"
        raise DataError(said)

    def _said_by_anyone(self) -> str:
        """What the first rank says that has met one; of one that is gone on with none may have."""
        words = np.zeros((self.mesh.layout.world, _LINE_BYTES), np.float32)
        mine = np.frombuffer(self.last.encode()[:_LINE_BYTES], np.uint8)
        words[self.mesh.rank, : mine.size] = mine
        everyone = torch.from_numpy(words)
        self.mesh.world.all_reduce(everyone)
        lines = [bytes(row.tolist()).rstrip(b"\0") for row in everyone.byte()]
        first = next(filter(None, lines), b"samples were bad before")
        return first.decode(errors="replace")
