"""The summed loss, whole and in chunks, with the vocabulary on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from loss_workers import CASES, VOCAB, inputs, loss_and_gradients, on_two_ranks
from train_groups import alone

from meshwright.train.loss import IGNORE, HeadLoss, count_valid, summed_loss


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


def _expected() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight, targets = inputs()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    logits = F.linear(x, weight).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORE)
    grad_x, grad_w = torch.autograd.grad(loss, (x, weight))
    return loss.detach(), grad_x, grad_w


@pytest.mark.parametrize(("chunk", "scale"), CASES)
def test_chunks_add_up_to_the_whole(chunk: int, scale: float) -> None:
    found = loss_and_gradients(HeadLoss(alone(), chunk), *inputs(), scale)
    torch.testing.assert_close(found, _expected(), rtol=1e-5, atol=1e-5)


def test_chunks_of_a_vocabulary_on_two_ranks(tmp_path: Path) -> None:
    by_rank = on_two_ranks(tmp_path)
    for case in range(len(CASES)):
        one, two = (found[case] for found in by_rank)
        loss, grad_x, grad_w = _expected()
        for found in (one, two):
            torch.testing.assert_close(found[0], loss)
        # A rank has the part of x's gradient that its own columns give.
        torch.testing.assert_close(one[1] + two[1], grad_x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.cat((one[2], two[2])), grad_w, rtol=1e-5, atol=1e-5)
        assert one[2].shape[0] == VOCAB // 2


@pytest.mark.parametrize("chunk", [0, 4])
def test_fp16_gradients_need_the_scale_from_the_start(chunk: int) -> None:
    """Gradients of logits near 1e-8 are zero in fp16; times 2^14 they are not."""
    x, weight, targets = inputs()
    targets[targets == IGNORE] = 0
    sure = torch.zeros_like(weight)
    sure[:, 0] = torch.tensor([18.0, *[0.0] * (VOCAB - 1)])
    x = torch.zeros_like(x)
    x[..., 0] = 1.0
    targets = torch.zeros_like(targets)
    half = x.half(), sure.half(), targets
    lost = loss_and_gradients(HeadLoss(alone(), chunk), *half, 1.0)
    kept = loss_and_gradients(HeadLoss(alone(), chunk), *half, 2.0**14)
    assert not lost[2].any()
    assert kept[2].any()


def test_no_gradients_are_made_where_none_are_wanted() -> None:
    x, weight, targets = inputs()
    with torch.no_grad():
        loss = HeadLoss(alone(), 4)(x, weight, targets, 1.0)
    assert loss.grad_fn is None
    torch.testing.assert_close(loss, _expected()[0])
