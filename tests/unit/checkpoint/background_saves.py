"""Ranks that save in the background in one process, over storage that obeys the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from states import LIMIT_S, Split, State, adam_state, shares, update_of

from meshwright.checkpoint.background import Background
from meshwright.checkpoint.chunks import Array
from meshwright.checkpoint.committing import Committing, Saved
from meshwright.checkpoint.files import Body, Entry, Files
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.store import MAIN, Store
from meshwright.checkpoint.writing import Encoding


@dataclass
class Live:
    """Memory that the next step changes."""

    values: Array

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    def copy_to(self, out: Array, start: int) -> None:
        out[...] = self.values[start : start + len(out)]


@dataclass
class Obedient:
    """Files that ask `before` each time one is made; it may wait, or raise."""

    files: Files
    before: Callable[[str], None] = lambda _: None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self.files.read(name, start, stop)

    def create(self, name: str, parts: Iterable[Body]) -> bool:
        self.before(name)
        return self.files.create(name, parts)

    def names(self, prefix: str) -> list[Entry]:
        return self.files.names(prefix)

    def remove(self, name: str) -> None:
        self.files.remove(name)


@dataclass
class Gate:
    """Holds up what is made under some prefixes until it is opened. One is `reached` then."""

    prefixes: tuple[str, ...] = ("packs/",)
    opened: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def __call__(self, name: str) -> None:
        if name.startswith(self.prefixes):
            self.reached.set()
            assert self.opened.wait(LIMIT_S)


class Ranks:
    """All ranks of `split`, each over `files[rank]` or all over `files`."""

    def __init__(
        self,
        files: Files | list[Files],
        split: Split,
        cap: int = 0,
        deadline_s: float = LIMIT_S,
        chunk_bytes: int = 64,
    ) -> None:
        self.split, self.chunk_bytes = split, chunk_bytes
        each = files if isinstance(files, list) else [files] * split.ranks
        self.stores = [Store.over(one, "here", create=True) for one in each]
        self.committing = Committing(self.stores[0], MAIN, deadline_s)
        self.ranks = [
            Background(store, MAIN, rank, cap, None if rank else self.committing)
            for rank, store in enumerate(self.stores)
        ]
        self.told: list[Saved] = []

    @property
    def store(self) -> Store:
        return self.stores[0]

    def save(
        self,
        step: int,
        state: State | None = None,
        change: bool = False,
        keep_base: bool = False,
        only: tuple[int, ...] | None = None,
        codec: str = "planes",
    ) -> list[dict[Piece, Live]]:
        """Hand a state over to (some of) the ranks: what they copied from."""
        state = adam_state(step) if state is None else state
        update = (lambda _: update_of(step)) if change else None
        encoding = Encoding(codec, self.chunk_bytes, update, durable=False)
        attempt = Attempt(step, f"step-{step}", self.split.ranks)
        live = [{p: Live(x.copy()) for p, x in one.items()} for one in shares(state, self.split)]
        for rank in range(self.split.ranks) if only is None else only:
            self.ranks[rank].save(attempt, live[rank], encoding, {"step": step}, keep_base)
        return live

    def wait(self) -> None:
        """Until nothing is on its way."""
        for rank in reversed(self.ranks):
            rank.wait()

    def outcomes(self) -> dict[int, str | None]:
        """The error, or None, of each step that has ended."""
        self.wait()
        self.told += [saved for rank in self.ranks for saved in rank.take_outcomes()]
        return {saved.step: saved.error for saved in self.told}


def await_true(what: Callable[[], bool]) -> None:
    """Watch until `what` holds."""
    end_s = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.005)
