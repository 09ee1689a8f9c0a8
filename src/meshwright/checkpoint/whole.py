"""Whether a commit's files are all there, without reading them: what a power failure tears."""

from __future__ import annotations

from meshwright.checkpoint.holding import Holding
from meshwright.checkpoint.packs import pack_name
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.stored import DamagedCommitError

_MANY = 16  # packs; more are listed all at once


def check_whole(holding: Holding, reader: Reader) -> None:
    """Raises DamagedCommitError if a pack of the commit, or of one that it is relative to, is
    absent or too short, or if an index is damaged."""
    needed: dict[str, tuple[int, str, int]] = {}  # of each pack: up to where, and who needs that
    while True:
        for row in (row for index in reader.indices for row in index.stored):
            for number, chunk in enumerate(row.chunks):
                stop = chunk.at + chunk.bytes
                if chunk.bytes and stop > needed.get(chunk.pack, (0, "", 0))[0]:
                    needed[chunk.pack] = (stop, row.of[0], number)
        if not reader.commit.depth:
            break
        reader = reader.parent
    prefixes = ["packs/"] if len(needed) > _MANY else sorted(map(pack_name, needed))
    sizes = {e.name: e.size for prefix in prefixes for e in holding.files.names(prefix)}
    for pack, (stop, tensor, number) in needed.items():
        size = sizes.get(pack_name(pack), 0)
        if size < stop:
            why = f"the file has {size} bytes" if size else "the file is absent"
            raise DamagedCommitError(holding.address, tensor, number, pack, size, stop, why)
