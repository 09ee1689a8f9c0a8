"""A save holds a pack beside the state, not a second copy of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("peak_memory.py")


def test_a_save_keeps_to_its_cap(tmp_path: Path) -> None:
    """radixark/Megatron-LM#61: 650 GB of host memory a node, since the whole shard is staged."""
    # Whatever is large is given back at once, so that no hole hides what is taken next.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert run.returncode == 0, run.stderr
    state, pack, *peaks = map(int, run.stdout.split())
    assert state > 20 * pack
    assert all(peak < 3 * pack for peak in peaks), peaks
