"""The self-test of a node: `python -m meshwright.control.engines.slurm_check FILE`.

Writes one line of JSON: what is in FILE, and how fast the node computes, copies and writes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

_SIDE = 512  # of square matrices of fp32
_BYTES = 1 << 25


def main(token: Path) -> None:
    """Test this machine."""
    a = np.ones((_SIDE, _SIDE), dtype=np.float32)
    block = np.zeros(_BYTES, dtype=np.uint8)
    scratch = token.with_name(f"check-{os.uname().nodename}-{os.getpid()}")
    try:
        write_s = _best(lambda: scratch.write_bytes(block.data))
    finally:
        scratch.unlink(missing_ok=True)
    found = {
        "node": os.environ.get("SLURMD_NODENAME", os.uname().nodename),
        "token": token.read_text(),
        "gflop_s": 2 * _SIDE**3 / _best(lambda: a @ a) / 1e9,
        "copy_gb_s": _BYTES / _best(block.copy) / 1e9,
        "write_gb_s": _BYTES / write_s / 1e9,
    }
    sys.stdout.write(json.dumps(found) + "\n")


def _best(work: Callable[[], object], times: int = 3) -> float:
    """Seconds of the fastest of several tries."""
    taken = []
    for _ in range(times):
        begun_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun_s)
    return max(min(taken), 1e-9)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
