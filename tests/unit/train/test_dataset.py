"""Our samples through PyTorch's own loader: any number of workers, one order."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from meshwright.base.errors import DataError
from meshwright.data.mixture import even
from meshwright.data.order import MixedRows, Order, plain_order
from meshwright.data.packing import PAD, PackedRows
from meshwright.data.store import TokenStore
from meshwright.data.windows import Windows
from meshwright.train.dataset import TokenBatch, TokenDataset
from meshwright.train.documents import document_ids
from meshwright.train.token_loader import TokenLoader


def rows(seed: int = 0) -> MixedRows:
    windows = Windows(TokenStore(Path("none"), np.arange(1001), np.array([0, 1001])), 10)
    return MixedRows([windows], plain_order(len(windows), seed))


def take(dataset: TokenDataset, count: int, workers: int = 0) -> list[list[int]]:
    found: list[list[int]] = []
    for batch in DataLoader(dataset, batch_size=None, num_workers=workers):
        found += batch.tokens[:, 0].tolist()
        if len(found) >= count:
            break
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing_of_the_order(workers: int) -> None:
    expected = rows().read(np.arange(36))[:, 0].tolist()
    assert take(TokenDataset(rows(), 6), 36, workers) == expected


def test_ranks_share_each_batch() -> None:
    parts = [take(TokenDataset(rows(), 5, rank, 2), 10 + rank) for rank in range(2)]
    assert len(parts[0]) == 10
    assert len(parts[1]) == 12  # five samples of two ranks are two and three
    together = parts[0][:2] + parts[1][:3]
    assert together == rows().read(np.arange(5))[:, 0].tolist()


def test_it_goes_on_where_the_trainer_was_whatever_was_read_ahead() -> None:
    dataset = TokenDataset(rows(), 4)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, prefetch_factor=4)
    fifth = next(islice(loader, 4, None))
    resumed = TokenDataset(rows(), 10).at(fifth.next_sample)
    assert take(resumed, 10) == rows().read(np.arange(20, 30))[:, 0].tolist()


def test_the_state_is_one_integer() -> None:
    dataset = TokenDataset(rows(), 4)
    reading = iter(dataset)
    next(reading), next(reading)
    state = dataset.state_dict()
    assert state["sample"] == 8
    resumed = TokenDataset(rows(), 4)
    resumed.load_state_dict(state)
    assert torch.equal(next(iter(resumed)).tokens, next(reading).tokens)


def test_a_state_of_other_data_is_refused_at_once() -> None:
    with pytest.raises(DataError, match="same sources, seed"):
        TokenDataset(rows(), 4).load_state_dict(rows(1).state(8))


def packed(documents: int = 400) -> MixedRows:
    """Two packed sources of documents that end with 0, the second one ending in a row half full."""
    sources = []
    for source in range(2):
        lengths = np.random.default_rng(source).integers(2, 40, documents)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.arange(1, starts[-1] + 1)
        tokens[starts[1:] - 1] = 0
        sources.append(PackedRows(TokenStore(Path("none"), tokens, starts), 31))
    return MixedRows(sources, Order(tuple(map(len, sources)), even(2, 0), 0))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_at_any_batch_with_any_workers(workers: int) -> None:
    """A message holds many batches, and workers have read ahead when it stops."""
    data = rows()
    expected = data.read(np.arange(96))[:, 0].tolist()
    loader = TokenLoader(TokenDataset(data, 6, rank=1, world=2), workers)
    for taken in (1, 5):
        found = [batch.tokens[:, 0].tolist() for batch in islice(loader, taken)]
        assert found == [expected[at + 3 : at + 6] for at in range(0, 6 * taken, 6)]
        state = loader.state_dict()
        assert state["sample"] == 6 * taken
        loader = TokenLoader(TokenDataset(data, 6, rank=1, world=2), workers)
    resumed = TokenLoader(TokenDataset(data, 8), 2 - workers)
    resumed.load_state_dict(state)
    assert [n for b in islice(resumed, 3) for n in b.tokens[:, 0].tolist()] == expected[30:54]
    with pytest.raises(DataError, match="same sources, seed"):
        resumed.load_state_dict(rows(1).state(8))


@pytest.mark.parametrize("workers", [0, 1])
def test_documents_come_with_every_row_where_asked_for(workers: int) -> None:
    """Case 10 of the survey: what a trainer of somebody else's masks attention by."""
    data, size = packed(), 5
    loader = TokenLoader(TokenDataset(data, size, documents=True), workers)
    seen = 0
    for batch in islice(loader, 60):
        assert batch.documents is not None
        assert batch.documents.dtype == torch.int32
        real = batch.tokens != PAD
        assert torch.equal(batch.documents[real], document_ids(batch.tokens, 0).int()[real])
        assert (batch.documents[~real] == -1).all()
        seen += int((~real).sum())
        edges = batch.cu_seqlens.tolist()
        flat = batch.documents.flatten().tolist()
        for first, stop in pairwise(edges):
            assert len(set(flat[first:stop])) == 1
        assert edges[-1] == len(flat)
        assert torch.equal(batch.tokens, torch.from_numpy(data.read(_of(batch, size))))
    assert seen


def _of(batch: TokenBatch, size: int) -> np.ndarray:
    return np.arange(batch.next_sample - size, batch.next_sample)


def test_streams_have_documents_too_and_none_come_unasked() -> None:
    store = TokenStore(
        Path("none"), np.array([3, 4, 0, 5, 0, 6, 7, 0, 8]), np.array([0, 3, 5, 8, 9])
    )
    windows = Windows(store, 4)
    data = MixedRows([windows], plain_order(len(windows), 0))
    batch = next(iter(TokenDataset(data, 2, documents=True)))
    assert batch.documents is not None
    pairs = zip(batch.tokens.tolist(), batch.documents.tolist(), strict=True)
    told = {tuple(row): documents for row, documents in pairs}
    assert told == {(3, 4, 0, 5, 0): [0, 0, 0, 1, 1], (0, 6, 7, 0, 8): [0, 1, 1, 1, 2]}
    with pytest.raises(ValueError, match="documents=True"):
        _ = next(iter(TokenDataset(data, 2))).cu_seqlens
