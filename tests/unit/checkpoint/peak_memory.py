"""Measures how much memory a save and a load take beside the state. Usage: peak_memory.py FOLDER.

Writes to standard output, in bytes: the state, a pack, and the peaks above the state while it is
saved by each codec, and while it is loaded. A process of its own, since peaks are of a process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.writing import Encoding

SIZE, MANY = 1 << 21, 24  # elements of a tensor, tensors
PACK_BYTES, CHUNK_BYTES = 8 << 20, 1 << 20


def peak_from_now() -> int:
    """Bytes that are resident; peaks are counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return 1024 * int(line.split()[1])


def main(folder: Path) -> None:
    """Save and load."""
    rng = np.random.default_rng(0)
    state = {
        Piece.whole(f"w{n}", (SIZE,)): rng.standard_normal(SIZE).astype(np.float32)
        for n in range(MANY)
    }
    store = Store.open(folder, create=True)
    found = [sum(array.nbytes for array in state.values()), PACK_BYTES]
    for codec in ("raw", "planes"):
        attempt = Attempt(1, codec, 1)
        before = peak_from_now()
        encoding = Encoding(codec, CHUNK_BYTES, durable=False, pack_bytes=PACK_BYTES)
        try:
            store.write_part(attempt, 0, state, encoding)
        except CheckpointError:
            assert codec == "planes"
            continue
        found.append(_status("VmHWM") - before)
        reader = store.reader(store.commit(attempt, {}))
    for array in state.values():
        array.fill(0)
    before = peak_from_now()
    reader.fill(state)
    found.append(_status("VmHWM") - before)
    sys.stdout.write(" ".join(map(str, found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
