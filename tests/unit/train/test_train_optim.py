"""Learning rate as a function of the step, and fp32 masters (trainer cases 8 and 12)."""

from __future__ import annotations

import pytest
import torch
from train_groups import flat_group

from meshwright.plan.job import OptimizerSection
from meshwright.train.optim import MasterOptimizer, learning_rate
from meshwright.train.parallel.flat import FlatGroup


def test_rate_warms_up_and_follows_the_cosine() -> None:
    settings = OptimizerSection(lr=1.0, warmup_steps=4, min_lr=0.1)
    rates = [learning_rate(settings, step, 15) for step in range(15)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[9] == pytest.approx((1.0 + 0.1) / 2)
    assert rates[14] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_rate_stays_at_the_bottom_beyond_the_last_step() -> None:
    settings = OptimizerSection(lr=1.0, min_lr=0.1)
    assert learning_rate(settings, 99, 10) == pytest.approx(0.1)
    assert learning_rate(settings, 0, 1) == 1.0


def test_small_updates_vanish_in_bf16_weights_but_not_in_masters() -> None:
    """100 updates of 6e-4 near 1.0: bf16 weights stay, fp32 masters all move."""
    settings = OptimizerSection(lr=6e-4, weight_decay=0.0)
    naive = torch.nn.Parameter(torch.ones(768, dtype=torch.bfloat16))
    plain = torch.optim.AdamW([naive], lr=6e-4, weight_decay=0.0)
    group = flat_group([("norm.weight", torch.ones(768))], dtype=torch.bfloat16)
    optimizer = MasterOptimizer([group], settings)
    for _ in range(100):
        naive.grad = torch.ones_like(naive)
        plain.step()
        group.grad.fill_(1.0)
        optimizer.step(6e-4)
        group.weights.start_refresh()
        group.weights.finish_refresh()
    assert int((naive != 1).sum()) == 0
    assert int((group.master != 1).sum()) == 768
    assert group.master[0].item() == pytest.approx(1 - 100 * 6e-4, rel=1e-3)
    assert group.weights.buffer.dtype == torch.bfloat16
    assert torch.equal(group.weights.buffer, group.master.bfloat16())


def test_weight_decay_of_3e_5_for_1000_steps_reaches_the_master() -> None:
    """In bf16 the weight stays 1.0; in fp32 it is 0.97044."""
    settings = OptimizerSection(lr=3e-4, weight_decay=0.1)
    group = flat_group([("layers.0.mlp.up.weight", torch.ones(4, 4))], dtype=torch.bfloat16)
    optimizer = MasterOptimizer([group], settings)
    for _ in range(1000):
        optimizer.step(3e-4)
    assert group.master[0].item() == pytest.approx(0.97044, abs=1e-4)
    weight = torch.ones((), dtype=torch.bfloat16)
    for _ in range(1000):
        weight *= 1 - 3e-5
    assert weight.item() == 1.0


def test_norms_and_biases_do_not_decay() -> None:
    settings = OptimizerSection(lr=0.1, weight_decay=0.5)
    group = flat_group(
        [
            ("norm.weight", torch.ones(3)),
            ("embed.weight", torch.ones(5, 3)),
            ("x.bias", torch.ones(2)),
        ]
    )
    MasterOptimizer([group], settings).step(0.1)
    values = {slot.name: set(group.master[here].tolist()) for slot, here, _ in group.spans()}
    assert values["norm.weight"] == values["x.bias"] == {1.0}
    assert values["embed.weight"].pop() == pytest.approx(0.95)


def test_equals_torchs_adamw_on_separate_parameters() -> None:
    settings = OptimizerSection(lr=1e-2, weight_decay=0.1)
    random = torch.Generator().manual_seed(0)
    start = {"embed.weight": torch.randn(6, 4, generator=random), "norm.weight": torch.ones(4)}
    group = flat_group(list(start.items()))
    ours = MasterOptimizer([group], settings)
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    plain = torch.optim.AdamW(
        [
            {"params": [theirs["embed.weight"]], "weight_decay": 0.1},
            {"params": [theirs["norm.weight"]], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=settings.betas,
        eps=settings.eps,
    )
    for _ in range(5):
        for slot, here, _ in group.spans():
            grad = torch.randn(slot.shape, generator=random)
            group.grad[here] = grad.flatten()
            theirs[slot.name].grad = grad
        ours.step(1e-2)
        plain.step()
    for slot, here, _ in group.spans():
        torch.testing.assert_close(group.master[here].view(slot.shape), theirs[slot.name].data)


def test_group_by_group_is_the_same_update() -> None:
    def made() -> tuple[list[FlatGroup], MasterOptimizer]:
        torch.manual_seed(3)
        names = ("layers.0.mlp.up.weight", "norm.weight")
        groups = [flat_group([(name, torch.randn(7, 5)) for name in names]) for _ in range(2)]
        for group in groups:
            group.grad.copy_(torch.randn(group.grad.shape))
        return groups, MasterOptimizer(groups, OptimizerSection(lr=1e-2))

    (groups, whole), (others, parts) = made(), made()
    for _ in range(2):
        whole.step(1e-2, 3.0)
        for index in (1, 0):
            parts.step_group(index, 1e-2, 3.0)
    assert whole.updates_done == parts.updates_done == 2
    for group, other in zip(groups, others, strict=True):
        assert torch.equal(group.master, other.master)
