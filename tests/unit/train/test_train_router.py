"""The router on one process: the choice, the losses, what is counted (trainer case 5)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expert_workers import Case, about, batch, cast, router, whole_layer
from torch import Tensor

from meshwright.train.nn.moe import MoE
from meshwright.train.nn.passing import Pass

LOSSES = {"aux_loss": 1e-2, "seq_aux_loss": 2e-2, "z_loss": 1e-3}


def run(moe: MoE, x: Tensor, grad: Tensor, passing: Pass) -> dict[str, Tensor]:
    for parameter in moe.parameters():
        parameter.grad = None
    moe(x, passing).backward(grad)
    return {name: p.grad.clone() for name, p in moe.named_parameters() if p.grad is not None}


# The choice


def test_of_equal_scores_the_lower_index_is_chosen() -> None:
    tied = router(n_experts=8, top_k=3)
    tied.weight.data.zero_()
    assert tied(torch.ones(1, 2, 32), about(2)).experts.tolist() == [[[0, 1, 2]] * 2]


def test_bias_changes_the_choice_but_no_weight() -> None:
    plain, x = router(gate="sigmoid", norm_top_k=False), batch(Case().spec)[0]
    before = plain(x, about())
    plain.bias[5] = 10.0
    after = plain(x, about())
    assert bool((after.experts[..., 0] == 5).all())
    scores = F.linear(x, plain.weight).sigmoid()
    torch.testing.assert_close(after.weights, scores.gather(-1, after.experts))
    assert not torch.equal(before.experts, after.experts)


@pytest.mark.parametrize(("gate", "group"), [("sigmoid", 1), ("softmax", 0)])
def test_a_group_is_scored_by_its_two_best_or_its_best(gate: str, group: int) -> None:
    grouped = router(n_experts=4, top_k=2, gate=gate, expert_groups=2, top_k_groups=1)
    # Group 0 has the best expert, group 1 the two best together.
    grouped.weight.data.zero_()
    grouped.weight.data[:, 0] = torch.tensor([1.0, -1.0, 0.8, 0.7])
    x = torch.zeros(1, 1, 32)
    x[..., 0] = 1.0
    chosen = grouped(x, about(1)).experts.flatten().tolist()
    assert {expert // 2 for expert in chosen} == {group}


def test_logits_are_taken_in_fp32_for_bf16_activations() -> None:
    x = batch(Case().spec)[0].bfloat16()
    low = cast(whole_layer(Case().spec), torch.bfloat16).router
    weights = low(x, about()).weights
    scores = F.linear(x.float(), low.weight.float()).softmax(-1).topk(2).values
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


def test_end_of_step_sets_load_bias_and_counts() -> None:
    ended = router(n_experts=4, bias_update_rate=0.5)
    ended.counts.fill_(7)
    ended.end_step(torch.tensor([2, 1, 5, 2 + 2 - 4 + 2]))
    assert ended.load.tolist() == pytest.approx([0.2, 0.1, 0.5, 0.2])
    assert ended.bias.tolist() == [0.5, 0.5, -0.5, 0.5]
    assert ended.counts.tolist() == [0] * 4
    ended.end_step(torch.tensor([3, 3, 3, 3]))
    assert ended.bias.tolist() == [0.5, 0.5, -0.5, 0.5]


# Losses


def explicit_loss(moe: MoE, x: Tensor, sequence_loads: Tensor) -> Tensor:
    """All router losses by their formulas, token by token."""
    spec, logits = moe.router.spec, F.linear(x, moe.router.weight)
    p = logits.softmax(-1)
    total = x.new_zeros(())
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            balance = spec.aux_loss * moe.router.load + spec.seq_aux_loss * sequence_loads[b]
            total = total + spec.n_experts * (balance * p[b, t]).sum()
            total = total + spec.z_loss * logits[b, t].exp().sum().log() ** 2
    return total


def test_losses_and_their_gradient_follow_the_formulas() -> None:
    moe = whole_layer(Case(model=LOSSES).spec)
    moe.router.load.copy_(torch.arange(1, 9) / 36)
    x, _ = batch(moe.router.spec)
    passing = about(loss_scale=64.0)
    route = moe.router(x, passing)
    chosen = F.one_hot(route.experts, 8).sum((1, 2))
    expected = explicit_loss(moe, x, chosen / chosen.sum(-1, keepdim=True))
    (by_formula,) = torch.autograd.grad(expected, moe.router.weight)
    (injected,) = torch.autograd.grad(route.weights, moe.router.weight, route.weights * 0)
    assert passing.penalty is not None
    torch.testing.assert_close(passing.penalty, expected.detach())
    torch.testing.assert_close(injected, 64.0 * by_formula, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("loss", ["aux_loss", "seq_aux_loss", "z_loss"])
@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_each_loss_is_additive_over_micro_batches(loss: str, gate: str) -> None:
    moe = whole_layer(Case(model={loss: 1.0, "gate": gate}).spec)
    moe.router.load.copy_(torch.arange(1, 9) / 36)
    x, grad = batch(moe.router.spec)
    whole = about()
    at_once = run(moe, x, grad, whole)
    parts, penalty = dict.fromkeys(at_once, torch.zeros(())), torch.zeros(())
    for i in range(4):
        part = about()
        found = run(moe, x[i : i + 1], grad[i : i + 1], part)
        parts = {name: parts[name] + found[name] for name in found}
        assert part.penalty is not None
        penalty = penalty + part.penalty
    assert whole.penalty is not None
    torch.testing.assert_close(penalty, whole.penalty)
    for name, total in at_once.items():
        torch.testing.assert_close(parts[name], total, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("loss", ["aux_loss", "seq_aux_loss", "z_loss"])
def test_each_loss_reaches_the_router(loss: str) -> None:
    found = []
    for coefficient in (0.0, 1e-2):
        moe = whole_layer(Case(model={loss: coefficient}).spec)
        moe.router.load.copy_(torch.arange(1, 9) / 36)
        found.append(run(moe, *batch(moe.router.spec), about())["router.weight"])
    assert float((found[0] - found[1]).abs().max()) > 1e-4


def test_equal_routers_share_a_penalty() -> None:
    moe = whole_layer(Case(model={"z_loss": 1.0}).spec)
    x, grad = batch(moe.router.spec)
    alone = about()
    whole = run(moe, x, grad * 0, alone)["router.weight"]
    moe.router.copies = 4
    shared = about()
    quarter = run(moe, x, grad * 0, shared)["router.weight"]
    assert alone.penalty is not None and shared.penalty is not None
    torch.testing.assert_close(quarter * 4, whole)
    torch.testing.assert_close(shared.penalty * 4, alone.penalty)


# Counting


def test_a_recomputed_layer_counts_once_and_has_the_same_gradient() -> None:
    moe = whole_layer(Case(model=LOSSES).spec)
    x, grad = batch(moe.router.spec)
    direct = run(moe, x, grad, about())
    counted = moe.router.counts.clone()
    assert int(counted.sum()) == 4 * 8 * 2
    moe.router.counts.zero_()
    passing = about()
    with torch.no_grad():
        moe(x, passing)
    reported = passing.penalty
    passing.recomputing = True
    again = run(moe, x, grad, passing)
    assert torch.equal(moe.router.counts, counted)
    assert passing.penalty is reported
    assert all(torch.equal(again[name], direct[name]) for name in direct)


def test_a_pass_that_forgets_that_it_recomputes_is_seen() -> None:
    moe = whole_layer(Case().spec)
    for _ in range(2):
        moe(batch(moe.router.spec)[0], about())
    assert int(moe.router.counts.sum()) == 2 * 4 * 8 * 2


def test_an_evaluation_counts_nothing() -> None:
    moe, passing = whole_layer(Case(model=LOSSES).spec), about(training=False)
    moe(batch(moe.router.spec)[0], passing)
    assert passing.penalty is None
    assert not moe.router.counts.any()
