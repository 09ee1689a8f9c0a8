"""What is dropped is a function of its number alone (trainer case 17)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.models.spec import ModelSpec
from meshwright.train.nn.dropout import Draws, dropout, dropped
from meshwright.train.nn.passing import Pass

SEQ, HIDDEN = 8, 16
DRAWS = Draws(seed=1, step=2, samples=torch.arange(6).view(2, 3))
ORDER, HOST = torch.arange(SEQ), torch.device("cpu")


def mask(draws: Draws, places: Tensor = ORDER, name: str = "0/mlp") -> Tensor:
    return dropped(draws, name, places, HIDDEN, 0.5)


def test_a_mask_depends_on_everything_that_it_should() -> None:
    whole = mask(DRAWS.of(0, HOST))
    assert whole.shape == (3, SEQ, HIDDEN)
    others = [
        mask(DRAWS.of(1, HOST)),
        mask(replace(DRAWS, seed=2).of(0, HOST)),
        mask(replace(DRAWS, step=3).of(0, HOST)),
        mask(DRAWS.of(0, HOST), ORDER + SEQ),
        mask(DRAWS.of(0, HOST), name="1/mlp"),
        mask(DRAWS.of(0, HOST), name="0/attention"),
    ]
    everything = torch.stack([whole, *others])
    assert len({row.numpy().tobytes() for row in everything.flatten(0, 2)}) == 7 * 3 * SEQ
    # Half of the numbers agree by chance.
    for other in others:
        assert 0.35 < float((other == whole).float().mean()) < 0.65


def test_parts_have_the_mask_of_the_whole() -> None:
    whole = mask(DRAWS.of(0, HOST))
    samples = replace(DRAWS, samples=DRAWS.samples[:, 1:]).of(0, HOST)
    assert torch.equal(mask(samples), whole[1:])
    early_and_late = torch.tensor([0, 1, 6, 7])
    assert torch.equal(mask(DRAWS.of(0, HOST), early_and_late), whole[:, early_and_late])


def test_slices_of_sequence_parallelism_are_those_of_the_order() -> None:
    x = torch.ones(3, SEQ, HIDDEN)
    order = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])
    draws = DRAWS.of(0, HOST)
    whole = dropout(x, Pass(None, order, draws=draws), 0.5, "0/mlp")
    for index in range(2):
        mine = replace(draws, slice_index=index, slices=2)
        part = dropout(x[:, :4], Pass(None, order, draws=mine), 0.5, "0/mlp")
        assert torch.equal(part, whole[:, index * 4 : index * 4 + 4])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_a_share_is_dropped_and_the_mean_stays(rate: float) -> None:
    draws = Draws(0, 0, torch.arange(8))
    x = torch.ones(8, 64, 64, requires_grad=True)
    out = dropout(x, Pass(None, torch.arange(64), draws=draws), rate, "0/mlp")
    assert float((out == 0).float().mean()) == pytest.approx(rate, abs=0.01)
    assert float(out.detach().mean()) == pytest.approx(1.0, abs=0.03)
    assert out.max().item() == pytest.approx(1 / (1 - rate))
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())  # type: ignore[arg-type]


def test_without_draws_or_rate_it_is_the_tensor_itself() -> None:
    x = torch.ones(3, SEQ, HIDDEN)
    assert dropout(x, Pass(None, ORDER), 0.5, "0/mlp") is x
    assert dropout(x, Pass(None, ORDER, draws=DRAWS.of(0, HOST)), 0.0, "0/mlp") is x


def test_a_rate_of_one_is_refused() -> None:
    shape = {"family": "llama", "layers": 1, "hidden": 8, "heads": 1, "vocab": 8}
    assert ModelSpec.model_validate({**shape, "dropout": 0.99}).dropout == 0.99
    with pytest.raises(ValueError, match="dropout"):
        ModelSpec.model_validate({**shape, "dropout": 1.0})
