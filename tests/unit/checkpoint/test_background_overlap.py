"""A copy that is made while training reads holds what was there when it was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from meshwright.checkpoint.background import Background
from meshwright.checkpoint.chunks import Array
from meshwright.checkpoint.codec import Update
from meshwright.checkpoint.committing import Committing
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.store import MAIN, Store
from meshwright.checkpoint.writing import Encoding

NAMES = ("param/a", "adamw.m/a", "adamw.v/a")
STEP = Update(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)


class Held:
    """A tensor whose copy begins only when it is let."""

    def __init__(self, values: Array, may: Event) -> None:
        self.values, self.may, self.dtype = values, may, values.dtype

    def copy_to(self, out: Array, start: int) -> None:
        self.may.wait(30)
        out[...] = self.values[start : start + len(out)]


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[tuple[Store, Background]]:
    store = Store.open(tmp_path, create=True)
    background = Background(store, MAIN, 0, committing=Committing(store, MAIN, 30.0))
    yield store, background
    background.wait()


def test_the_state_changes_only_behind_the_fence(saving: tuple[Store, Background]) -> None:
    store, background = saving
    random = np.random.default_rng(0)
    state = {Piece.whole(n, (70,)): random.random(70, np.float32) for n in NAMES}
    wanted = []
    for step in range(1, 4):
        may = Event()
        sources = {piece: Held(values, may) for piece, values in state.items()}
        encoding = Encoding("planes", update=(lambda _: STEP) if step > 1 else None)
        attempt = Attempt(step, f"step-{step}", 1)
        background.save(attempt, sources, encoding, keep_base=True, overlap=True)
        assert background.is_writing  # it has returned before anything was copied
        wanted.append({piece: values.copy() for piece, values in state.items()})
        may.set()
        background.fence()
        for values in state.values():
            values += 1
        background.wait()
    assert [outcome.error for outcome in background.take_outcomes()] == [None] * 3
    commits = store.commits()
    assert [commit.depth for commit in commits] == [0, 1, 2]
    for commit, saved in zip(commits, wanted, strict=True):
        for piece, values in saved.items():
            assert store.reader(commit).read_piece(piece).tobytes() == values.tobytes()
