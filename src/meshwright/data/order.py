"""The one order of a run's samples, over all its sources, for any number of readers.

Sample k is a pure function of the seed, the mixture and the sizes of the sources. The state of all
of it is k and the fingerprint of what it was counted on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import ConfigError, DamagedError, DataError
from meshwright.data.mixture import Draws, Mixture, even
from meshwright.data.sampler import derived_seed, sample_indices
from meshwright.data.samples import Sample, SampleStore
from meshwright.data.store import TokenStore
from meshwright.data.tolerance import BadSamples

Longs = npt.NDArray[np.int64]

_TOGETHER = 1 << 10  # samples, however short
_TOGETHER_BYTES = (
    1 << 20
)  # of rows: a call costs as much as 100 KB, more than this leaves the cache


class Rows(Protocol):
    """Samples of one length by number: see `windows.Windows` and `packing.PackedRows`."""

    @property
    def seq_len(self) -> int:
        """Tokens of a sample less one."""

    @property
    def store(self) -> TokenStore:
        """What they are cut from."""

    def __len__(self) -> int: ...

    def spans(self, indices: Longs) -> list[tuple[int, int]]:
        """Where in the store the tokens of samples `indices` are, as [start, stop)."""

    def read(self, indices: Longs) -> Longs:
        """Tokens of samples `indices` [m], int64 [m, seq_len + 1]."""

    def documents(self, indices: Longs) -> npt.NDArray[np.int32]:
        """The document of each of their tokens, counted from 0 in each sample, -1 for padding;
        int32 [m, seq_len + 1]."""


@dataclass(frozen=True)
class Order:
    """Over sources of `sizes` samples. Each epoch of a source takes every sample of it once, in an
    order of its own; how fast epochs pass is up to `mixture`."""

    sizes: tuple[int, ...]
    mixture: Mixture
    seed: int

    def __post_init__(self) -> None:
        """Raises ConfigError where the mixture is of other sources, DataError for an empty one."""
        if len(self.sizes) != self.mixture.sources:
            fix = f"there are {len(self.sizes)} sources; give each its weight"
            raise ConfigError("data.mixture", f"{self.mixture.sources} weights", fix)
        for index, size in enumerate(self.sizes):
            if size < 1:
                raise DataError(f"data.source number {index + 1}: has no samples; leave it out")

    def at(self, ks: Longs) -> Draws:
        """Source and sample in it (`number`) of each of samples `ks` [m] >= 0 of the run."""
        draws = self.mixture.draws(ks)
        index = np.empty_like(ks)
        for source in np.unique(draws.source):
            mine = draws.source == source
            seed, size = self._seeds[source], self.sizes[source]
            index[mine] = sample_indices(seed, draws.number[mine], size)
        return Draws(draws.source, index)

    def epochs(self, k: int) -> list[float]:
        """How often each source has been gone through when the run is at sample `k`."""
        return [float(n / s) for n, s in zip(self.mixture.taken(k), self.sizes, strict=True)]

    @cached_property
    def _seeds(self) -> tuple[int, ...]:
        more = range(1, len(self.sizes))
        return (self.seed, *(derived_seed(self.seed, source) for source in more))

    @cached_property
    def fingerprint(self) -> str:
        """Of all that decides the order."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def plain_order(size: int, seed: int) -> Order:
    """Of one source alone: sample k is that of `sampler.sample_indices`."""
    return Order((size,), even(1, seed), seed)


class Position:
    """The state of a sequence of samples: one integer, and the fingerprint of what it counts."""

    order: Order
    identity: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> str:
        """Of the order and the data."""
        identity = [self.order.fingerprint, *self.identity]
        return sha256(json.dumps(identity).encode()).hexdigest()

    def state(self, k: int) -> dict[str, Any]:
        """What a resumed run needs: see `position_of`."""
        return {"sample": k, "data": self.fingerprint}

    def position_of(self, state: dict[str, Any]) -> int:
        """The sample to go on with. Raises DataError if `state` was taken on other data."""
        try:
            sample, data = state["sample"], state["data"]
        except KeyError as error:
            raise DataError(f"data state {state}: has no {error}; it is not ours") from error
        if data != self.fingerprint:
            raise DataError(
                f"data state at sample {sample}: is of data {str(data)[:12]}, these are "
                f"{self.fingerprint[:12]}; name the same sources, seed, seq_len and mixture"
            )
        return int(sample)

    def _check(self, sizes: tuple[int, ...]) -> None:
        if sizes != self.order.sizes:
            raise DataError(f"the order is over {self.order.sizes} samples, the data have {sizes}")


@dataclass(frozen=True)
class MixedRows(Position):
    """The endless sequence of samples of a run over several sources of one `seq_len`.

    `identity` names the data themselves, as the hash of each manifest, so that a state is never
    taken up on other data.
    """

    sources: Sequence[Rows]
    order: Order
    identity: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError where rows differ in length, or `order` is of other sources."""
        lengths = sorted({rows.seq_len for rows in self.sources})
        if len(lengths) != 1:
            raise ConfigError("data.seq_len", lengths, "all sources have the same; build them so")
        self._check(tuple(len(rows) for rows in self.sources))

    def read(self, ks: Longs) -> Longs:
        """Tokens of samples number `ks` [m] of the run, int64 [m, seq_len + 1]."""
        return self.read_at(self.order.at(ks))

    def read_at(self, draws: Draws) -> Longs:
        """Tokens of samples that `order.at` has found already."""
        if len(self.sources) == 1:
            return self.sources[0].read(draws.number)
        width = self.sources[0].seq_len + 1
        out = np.empty((len(draws.number), width), dtype=np.int64)
        for source in np.unique(draws.source):
            mine = draws.source == source
            out[mine] = self.sources[source].read(draws.number[mine])
        return out

    @cached_property
    def at_once(self) -> int:
        """How many samples are best read together. Of what is in memory a call costs more than a
        small batch; of what has to be waited for, or may be bad, each batch is read for itself."""
        if not all(getattr(rows, "in_memory", False) for rows in self.sources):
            return 1
        many = _TOGETHER_BYTES // (8 * (self.sources[0].seq_len + 1))
        return max(1, min(many, _TOGETHER))

    @property
    def far(self) -> bool:
        """Whether some of it is fetched over a network."""
        return any(hasattr(rows.store.tokens, "fetch") for rows in self.sources)


@dataclass(frozen=True)
class MixedSamples(Position):
    """As `MixedRows`, over sample stores: images, audio, proteins as bytes with named fields.

    `bad` says how many damaged ones may be left out of their batches.
    """

    sources: Sequence[SampleStore]
    order: Order
    identity: tuple[str, ...] = ()
    bad: BadSamples = field(default_factory=BadSamples)

    def __post_init__(self) -> None:
        """Raises DataError where `order` is of other sources."""
        self._check(tuple(len(store) for store in self.sources))

    @property
    def at_once(self) -> int:
        """How many samples are best read together: their size is their own."""
        return 1

    def read(self, ks: Longs) -> list[Sample]:
        """Samples number `ks` [m] of the run."""
        return self.read_at(self.order.at(ks))

    def read_at(self, draws: Draws) -> list[Sample]:
        """Samples that `order.at` has found already."""
        found = []
        for source, index in zip(draws.source.tolist(), draws.number.tolist(), strict=True):
            try:
                found.append(self.sources[source].read(index))
            except DamagedError as error:
                self.bad.add(error)
        return found
