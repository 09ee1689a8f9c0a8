"""Whatever file event a save dies at, a whole commit remains and the next save goes through."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import begin, commit, commits, latest, retain, write_rank

SCRIPT = Path(__file__).with_name("kill_at_every_event.py")


def test_a_kill_at_any_file_event_leaves_a_whole_commit(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    kills = int(run.stdout)
    newest = []
    for root in sorted(tmp_path.iterdir())[:kills]:
        for one in commits(root):
            reader = Reader(one.path)
            assert reader.meta == {"step": one.step}
            assert reader.read("w").tolist() == [[one.step] * 2] * 4
        survivor = latest(root)
        assert survivor is not None
        newest.append(survivor.step)
        _save_again(root, survivor.step + 1)
    assert kills >= 12
    # Once published, a step stays; the kills before and after the rename must both have happened.
    assert newest == sorted(newest)
    assert set(newest) == {1, 2}


def _save_again(root: Path, step: int) -> None:
    tmp = begin(root, step)
    write_rank(tmp, 0, {Piece.whole("w", (4, 2)): np.full(8, step, np.float32)})
    commit(root, step, {}, 1)
    retain(root, 1)
    assert [path.name for path in root.iterdir()] == [f"step-{step:06d}"]
