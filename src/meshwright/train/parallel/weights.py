"""The weights in use: a full buffer in the compute type, made from the shards of the masters."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.train.comm import Axis, Pending


class FullWeights:
    """The full buffer of one flat group, whose `master` shard lies on this rank.

    `frees` (ZeRO stage 3): it exists only while gathered. In fp32 without shards it is the master
    itself.
    """

    def __init__(
        self,
        master: Tensor,
        shards: Axis,
        dtype: torch.dtype,
        device: torch.device,
        frees: bool,
    ) -> None:
        self._master, self._shards, self._frees = master, shards, frees
        alone = shards.size == 1 and dtype == torch.float32 and master.device == device
        size = master.numel() * shards.size
        self.buffer = master if alone else torch.empty(size, dtype=dtype, device=device)
        self._present = True
        self._gathering: Pending | None = None

    def start_gather(self) -> None:
        """Begin to make the weights present; no-op if they are or will be."""
        if self._present or self._gathering is not None:
            return
        self._resize(self.buffer.numel())
        self._gathering = self._start()

    def gather(self) -> None:
        """Make the weights present; no-op if they are."""
        self.start_gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering, self._present = None, True

    def release(self) -> None:
        """Free the weights where the shards make them again when they are needed."""
        if self._frees:
            if self._gathering is not None:
                self.gather()
            self._resize(0)
            self._present = False

    def start_refresh(self) -> None:
        """The masters have changed: begin to make the weights follow, or free what is stale."""
        if self._frees:
            self.release()
        elif self.buffer is not self._master:
            self._present, self._gathering = False, self._start()

    def finish_refresh(self) -> None:
        """Wait until the weights that are kept have followed."""
        if self._gathering is not None:
            self.gather()

    def abandon(self) -> None:
        """Forget a gathering that was interrupted; `start_refresh` begins anew."""
        self._gathering = None
        if self._frees:
            self._resize(0)
            self._present = False

    def _start(self) -> Pending:
        mine = self._master.to(self.buffer.device, self.buffer.dtype)
        return self._shards.start_all_gather(self.buffer, mine)

    def _resize(self, numel: int) -> None:
        self.buffer.untyped_storage().resize_(numel * self.buffer.element_size())
