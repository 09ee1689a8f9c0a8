"""Our samples through PyTorch's own loader: any number of workers, one order."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from meshwright.base.errors import DataError
from meshwright.data.order import MixedRows, plain_order
from meshwright.data.store import TokenStore
from meshwright.data.windows import Windows
from meshwright.train.dataset import TokenDataset


def rows(seed: int = 0) -> MixedRows:
    windows = Windows(TokenStore(Path("none"), np.arange(1001), np.array([0, 1001])), 10)
    return MixedRows([windows], plain_order(len(windows), seed))


def take(dataset: TokenDataset, count: int, workers: int = 0) -> list[list[int]]:
    found: list[list[int]] = []
    for batch in DataLoader(dataset, batch_size=None, num_workers=workers):
        found += batch["tokens"][:, 0].tolist()
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
    resumed = TokenDataset(rows(), 10).at(int(fifth["next_sample"]))
    assert take(resumed, 10) == rows().read(np.arange(20, 30))[:, 0].tolist()


def test_the_state_is_one_integer() -> None:
    dataset = TokenDataset(rows(), 4)
    reading = iter(dataset)
    next(reading), next(reading)
    state = dataset.state_dict()
    assert state["sample"] == 8
    resumed = TokenDataset(rows(), 4)
    resumed.load_state_dict(state)
    ours, theirs = next(iter(resumed))["tokens"], next(reading)["tokens"]
    assert isinstance(ours, torch.Tensor)
    assert isinstance(theirs, torch.Tensor)
    assert torch.equal(ours, theirs)


def test_a_state_of_other_data_is_refused_at_once() -> None:
    with pytest.raises(DataError, match="same sources, seed"):
        TokenDataset(rows(), 4).load_state_dict(rows(1).state(8))
