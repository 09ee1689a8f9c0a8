"""What is known to be damaged, and which commits need it, so that those need not be read."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.checkpoint.lineage import chain
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.stored import DamagedCommitError


class Ruins:
    """Damage that was found, by packs, and readers of commits that were asked about: an index is
    read once, though many commits may be relative to one."""

    def __init__(self) -> None:
        self._damages: dict[str, list[DamagedCommitError]] = {}
        self._readers: dict[str, Reader] = {}
        self._packs: dict[str, frozenset[str]] = {}

    def add(self, damage: DamagedCommitError) -> None:
        """Note what was found."""
        self._damages.setdefault(damage.pack, []).append(damage)

    def why(self, reader: Reader) -> str | None:
        """Why a commit cannot be whole, None if nothing is known. Reads indices alone. Raises
        CheckpointError, DamagedCommitError if an index is damaged."""
        above: list[Reader] = []
        for one in chain(self._readers.get(reader.commit.id, reader)) if self._damages else ():
            self._readers[one.commit.id] = one
            if (why := self._hit(one, above)) is not None:
                return why
            above.append(one)
        return None

    def _hit(self, reader: Reader, above: Sequence[Reader]) -> str | None:
        """Damage of a commit that those `above` need, which are relative to each other and to it;
        a chunk that one of them does without is none of theirs."""
        for ref in reader.refs:
            if (why := self._at(ref.pack, ref.at, ref.bytes)) is not None:
                return why
        if self._packs_of(reader).isdisjoint(self._damages):
            return None
        for row in (row for index in reader.indices for row in index.stored):
            for number, chunk in enumerate(row.chunks):
                why = self._at(chunk.pack, chunk.at, chunk.bytes)
                if why is not None and all(one.goes_on_from(row, number) for one in above):
                    return why
        return None

    def _at(self, pack: str, at: int, size: int) -> str | None:
        damages = self._damages.get(pack, ())
        return next((str(d) for d in damages if at < d.stop and d.start < at + size), None)

    def _packs_of(self, reader: Reader) -> frozenset[str]:
        name = reader.commit.id
        if name not in self._packs:
            self._packs[name] = frozenset(pack for index in reader.indices for pack in index.packs)
        return self._packs[name]
