"""How a global batch is shared out over ranks, and batches over workers."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.base.errors import ConfigError


@dataclass(frozen=True)
class Share:
    """What reader `worker` of `workers` of rank `rank` of `world` reads of global batches.

    Batch i is samples [i·batch, (i+1)·batch). A rank has one range of each, as even as it gets, so
    that all ranks take the same number of steps whatever divides what. Worker w reads batches
    i = w, w + workers, ... counted from where the run starts.
    """

    batch: int
    rank: int = 0
    world: int = 1
    worker: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if not 0 <= self.rank < self.world or not 0 <= self.worker < self.workers:
            where = f"rank {self.rank} of {self.world}, worker {self.worker} of {self.workers}"
            raise ConfigError("share", where, "ranks and workers count from 0")
        if self.batch < self.world:
            fix = f"{self.world} ranks need a sample each; raise it or use fewer ranks"
            raise ConfigError("data.global_batch", self.batch, fix)

    def samples(self, first: int) -> range:
        """This rank's samples of the global batch that begins at sample `first`."""
        low = self.batch * self.rank // self.world
        high = self.batch * (self.rank + 1) // self.world
        return range(first + low, first + high)
