"""Activations that wait on the host: real copies, and the same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.train import saved
from meshwright.train.saved import ActivationStore

WIDE = 80  # 80 x 80 elements are above the bound of what is moved


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.SiLU(), nn.Linear(WIDE, WIDE), nn.Tanh())


def gradients(store: ActivationStore, net: nn.Sequential, spoil: bool = False) -> list[Tensor]:
    x = torch.randn(WIDE, WIDE, generator=torch.Generator().manual_seed(1)).requires_grad_()
    inner: list[Tensor] = []
    net[1].register_forward_hook(lambda *call: inner.append(call[2]))
    with store.keeping():
        loss = net(x).square().sum()
    if spoil:  # what autograd saved in place is now another; a copy is not
        inner[0].data.zero_()
    return list(torch.autograd.grad(loss, [x, *net.parameters()]))


@pytest.mark.parametrize("spoil", [False, True])
def test_gradients_are_equal_and_saved_tensors_are_copies(spoil: bool) -> None:
    expected = gradients(ActivationStore(False), model())
    net = model()
    store = ActivationStore(True, weights=tuple(p.data for p in net.parameters()))
    found = gradients(store, net, spoil)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_without_offload_nothing_is_copied() -> None:
    """So the test above can fail."""
    expected = gradients(ActivationStore(False), model())
    spoiled = gradients(ActivationStore(False), model(), spoil=True)
    assert not torch.equal(spoiled[3], expected[3])


def test_weights_and_small_tensors_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, ...]] = []
    right = saved._OnHost

    def noted(copy: Tensor, device: torch.device) -> object:
        moved.append(tuple(copy.shape))
        return right(copy, device)

    monkeypatch.setattr(saved, "_OnHost", noted)
    net = model()
    weights = tuple(p.data for p in net.parameters())
    few = torch.randn(2, WIDE, requires_grad=True)
    with ActivationStore(True, weights).keeping():
        net(few).sum()
    assert moved == []
    many = torch.randn(WIDE, WIDE, requires_grad=True)
    with ActivationStore(True, weights).keeping():
        net(many).sum()
    # The input, what SiLU and the second layer saw, and what tanh gave.
    assert moved == [(WIDE, WIDE)] * 4
    moved.clear()
    with ActivationStore(True, weights).keeping(), torch.no_grad():
        net(many).sum()
    assert moved == []
