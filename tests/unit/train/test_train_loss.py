"""The summed loss, on one rank; over a split vocabulary it is proven by the parity tests."""

from __future__ import annotations

import pytest
import torch
from train_groups import alone

from meshwright.train.loss import IGNORE, count_valid, summed_loss


def test_ignored_targets_do_not_count() -> None:
    logits = torch.zeros(1, 4, 8)
    targets = torch.tensor([[1, IGNORE, 3, IGNORE]])
    assert count_valid(targets) == 2
    assert summed_loss(logits, targets, alone()).item() == pytest.approx(2 * 2.0794415)


def test_all_ignored_is_zero_not_nan() -> None:
    logits = torch.randn(1, 2, 8, requires_grad=True)
    loss = summed_loss(logits, torch.full((1, 2), IGNORE), alone())
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()
