"""Stretches of packs, checked each time they are read."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.files import read_into
from meshwright.checkpoint.holding import Holding
from meshwright.checkpoint.packs import pack_name, xxh3
from meshwright.checkpoint.parts import index_bound
from meshwright.checkpoint.record import Index, IndexRef, load_index
from meshwright.checkpoint.spread import spread

_AT_ONCE = 8


class DamagedCommitError(CheckpointError):
    """Bytes of a commit are absent or others than were written.

    `tensor` (or "index of rank 3"), `chunk` its number in its piece, `pack` the file, and its bytes
    [`start`, `stop`) that are wrong.
    """

    def __init__(
        self, where: str, tensor: str, chunk: int, pack: str, start: int, stop: int, why: str
    ) -> None:
        self.tensor, self.chunk, self.pack = tensor, chunk, pack
        self.start, self.stop, self.why = start, stop, why
        super().__init__(
            f"{where}: {tensor} is damaged: chunk {chunk}, bytes [{start}, {stop}) of "
            f"{pack_name(pack)}: {why}; restore that file from a copy, or go on from the commit "
            "before"
        )


def read_stored(
    holding: Holding,
    pack: str,
    at: int,
    size: int,
    xxh3_: str,
    tensor: str,
    chunk: int,
    into: memoryview | None = None,
) -> bytes | memoryview:
    """Bytes [at, at + size) of a pack, `into` memory of that size if that is given. Raises
    DamagedCommitError, which names `tensor` and `chunk`, unless they are what their hash says."""
    body: bytes | memoryview = b""
    try:
        if into is None:
            body = holding.files.read(pack_name(pack), at, at + size)
        else:
            body = into[: read_into(holding.files, pack_name(pack), at, into)]
    except FileNotFoundError:
        why = "the file is absent"
    else:
        if len(body) == size and xxh3(body) == xxh3_:
            return body
        short = len(body) < size
        why = f"{size - len(body)} bytes are missing" if short else "their hash differs"
    raise DamagedCommitError(holding.address, tensor, chunk, pack, at, at + size, why)


def read_indices(holding: Holding, attempt: str, refs: Sequence[IndexRef]) -> tuple[Index, ...]:
    """What all ranks wrote, by rank. Raises DamagedCommitError."""
    ranks = list(enumerate(refs))
    return tuple(spread(lambda one: read_index(holding, attempt, *one), ranks, _AT_ONCE))


def read_index(holding: Holding, attempt: str, rank: int, ref: IndexRef) -> Index:
    """What a rank wrote for an attempt. Raises DamagedCommitError."""
    named = f"index of rank {rank}"
    closed = read_stored(holding, ref.pack, ref.at, ref.bytes, ref.xxh3, named, 0)
    body = holding.open(closed, *index_bound(attempt, rank))
    try:
        return load_index(bytes(body), ref)
    except ValueError as error:
        raise DamagedCommitError(
            holding.address, named, 0, ref.pack, ref.at, ref.at + ref.bytes, str(error)
        ) from error
