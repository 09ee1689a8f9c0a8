"""Every sample of a run once and in one order, by all that may happen to a run together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.mixture import BLOCK, Mixture, Stage
from meshwright.data.order import MixedRows, Order
from meshwright.data.packing import PAD, PackedRows
from meshwright.data.reader import BatchReader
from meshwright.data.share import Share
from meshwright.data.store import TokenStore

FAR_APART = 10**6  # ids of one source and the next


def packed(lengths: list[int], base: int) -> PackedRows:
    """A corpus in which each token is another."""
    starts = np.cumsum([0, *lengths])
    return PackedRows(TokenStore(Path("none"), base + np.arange(starts[-1]), starts), 15)


@st.composite
def corpora(draw: st.DrawFn) -> MixedRows:
    """Packed sources, mixed by weights that change on the way."""
    seed = draw(st.integers(0, 2**32))
    counts = draw(st.lists(st.integers(3, 150), min_size=1, max_size=3))
    lengths = [np.random.default_rng(seed).integers(1, 30, count).tolist() for count in counts]
    sources = [packed(some, FAR_APART * place) for place, some in enumerate(lengths)]
    weights = st.lists(st.integers(1, 9), min_size=len(counts), max_size=len(counts))
    changes = draw(st.lists(st.integers(1, 500), max_size=2, unique=True))
    stages = [Stage(start, tuple(map(float, draw(weights)))) for start in (0, *sorted(changes))]
    sizes = tuple(len(rows) for rows in sources)
    return MixedRows(sources, Order(sizes, Mixture(tuple(stages), seed), seed))


@settings(max_examples=12, deadline=None)
@given(corpora(), st.data())
def test_kills_and_resumes_with_any_ranks_and_workers_lose_and_repeat_nothing(
    rows: MixedRows, data: st.DataObject
) -> None:
    """Incarnations of another world, other workers and another batch: each trains some steps,
    commits now and then, and is killed; the next goes on from the last commit."""
    kept: list[np.ndarray] = []
    state = rows.state(0)
    for _ in range(data.draw(st.integers(1, 4))):
        batch = data.draw(st.integers(1, 24))
        world, workers = data.draw(st.integers(1, min(batch, 7))), data.draw(st.integers(1, 3))
        steps, every = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
        start, unsaved = rows.position_of(state), []
        for step in range(steps):
            share = [Share(batch, r, world, step % workers, workers) for r in range(world)]
            unsaved += [BatchReader(rows, s, start).read(step // workers).content for s in share]
            if (step + 1) % every == 0:
                kept += unsaved
                unsaved, state = [], rows.state(start + (step + 1) * batch)
    count = rows.position_of(state)
    found = np.concatenate([np.empty((0, 16), np.int64), *kept])
    assert np.array_equal(found, rows.read(np.arange(count)))


@settings(max_examples=12, deadline=None)
@given(corpora())
def test_each_token_of_each_source_comes_once_in_each_epoch(rows: MixedRows) -> None:
    samples = np.arange(64 * 40)
    draws, tokens = rows.order.mixture.draws(samples), rows.read(samples)
    for place, source in enumerate(rows.sources):
        numbers, size = draws.number[draws.source == place], len(source)
        assert len(np.unique(numbers)) == numbers.size
        mine = tokens[draws.source == place]
        whole_epochs = (numbers.size - BLOCK) // size  # of the last block some are still to come
        for epoch in range(min(3, whole_epochs)):
            seen = mine[numbers // size == epoch]
            whole = FAR_APART * place + np.arange(source.store.n_tokens)
            assert np.array_equal(np.sort(seen[seen != PAD]), whole)
