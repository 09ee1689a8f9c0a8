"""A mixture of experts beside `transformers`, its capacity, and how it is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_workers import Case, about, batch, router, whole_layer

from meshwright.plan.experts import initial
from meshwright.train.comm import Axis, Clock
from meshwright.train.nn.moe import MoE
from meshwright.train.nn.passing import Pass
from meshwright.train.parallel.expert import apply_expert_parallel


def theirs(moe: MoE, config: Any, block: Any, shared: bool) -> Any:
    """The block of `transformers` with the weights of `moe`."""
    other = block(config)
    state = {
        "gate.weight": moe.router.weight,
        "experts.gate_up_proj": torch.cat((moe.experts.gate, moe.experts.up), dim=1),
        "experts.down_proj": moe.experts.down,
    }
    if shared:
        assert moe.shared is not None
        for name in ("gate", "up", "down"):
            state[f"shared_experts.{name}_proj.weight"] = getattr(moe.shared, name).weight
        state["gate.e_score_correction_bias"] = moe.router.bias
    other.load_state_dict(state)
    return other


def agree(moe: MoE, other: Any) -> None:
    x, grad = batch(moe.router.spec)
    ours, their = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = moe(ours, about()), other(their)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    out.backward(grad)
    expected.backward(grad)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, their.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(moe.router.weight.grad, other.gate.weight.grad, atol=1e-4, rtol=1e-4)


def test_mixtral() -> None:
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=32, intermediate_size=16, num_local_experts=8, num_experts_per_tok=2
    )
    moe = whole_layer(Case().spec)
    agree(moe, theirs(moe, config, MixtralSparseMoeBlock, shared=False))


@pytest.mark.parametrize("norm", [True, False])
def test_qwen3_moe(norm: bool) -> None:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=norm,
    )
    moe = whole_layer(Case(model={"top_k": 3, "norm_top_k": norm}).spec)
    agree(moe, theirs(moe, config, Qwen3MoeSparseMoeBlock, shared=False))


def test_deepseek_v3() -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_local_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
    )
    model = {"gate": "sigmoid", "top_k": 3, "expert_groups": 4, "top_k_groups": 2}
    moe = whole_layer(Case(model=model | {"n_shared_experts": 2, "routed_scaling": 2.5}).spec)
    moe.router.bias.copy_(torch.linspace(-0.3, 0.3, 8))
    agree(moe, theirs(moe, config, DeepseekV3MoE, shared=True))


def test_a_layer_on_the_meta_device_has_its_state_and_is_cut_there() -> None:
    with torch.device("meta"):
        moe = MoE(Case().spec)
    alone, second = Axis((0,), 0, None, Clock()), Axis((0, 1), 1, None, Clock())
    apply_expert_parallel(moe, second, second, alone, initial(8, 2, 2))
    assert moe.experts.gate.is_meta and moe.router.weight.is_meta
    assert tuple(moe.experts.gate.shape) == tuple(moe.experts.up.shape) == (5, 8, 32)
    assert tuple(moe.experts.down.shape) == (5, 32, 8)
    moe.move_state(torch.device("cpu"))
    assert {str(b.device) for b in moe.buffers()} == {"cpu"}
    assert moe.router.load.tolist() == [1 / 8] * 8


# Capacity


def test_capacity_keeps_the_first_tokens_of_each_sequence() -> None:
    limited = router(n_experts=4, top_k=1, capacity_factor=1.0)
    limited.weight.data.zero_()
    limited.weight.data[[0, 1], [0, 1]] = 1.0
    x = torch.zeros(2, 8, 32)
    x[0, :, 0] = 1.0  # all eight to expert 0, which takes two
    x[1, ::2, 0] = 1.0
    x[1, 1::2, 1] = 1.0
    kept = limited(x, about()).kept
    assert kept[..., 0].int().tolist() == [[1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]


def test_capacity_follows_the_order_of_the_sequence() -> None:
    limited = router(n_experts=4, top_k=1, capacity_factor=1.0)
    limited.weight.data.zero_()
    order = torch.tensor([6, 0, 7, 1, 2, 3, 4, 5])
    kept = limited(torch.ones(1, 8, 32), Pass(rope=None, order=order)).kept
    assert kept.flatten().int().tolist() == [0, 1, 0, 1, 0, 0, 0, 0]


def test_a_dropped_token_has_no_routed_output_and_no_expert_gradient() -> None:
    moe = whole_layer(Case(model={"top_k": 1, "capacity_factor": 1.0}).spec)
    moe.router.weight.data.zero_()
    x, grad = batch(moe.router.spec)
    x.requires_grad_()
    out = moe(x, about())
    out.backward(grad)
    assert x.grad is not None
    assert bool(out[:, 0].any()) and bool(x.grad[:, 0].any())
    assert not out[:, 1:].any()
    assert not x.grad[:, 1:].any()
    assert moe.router.counts.tolist() == [32, *[0] * 7]  # what was asked for, not what fitted


def test_own_slice_of_a_sequence_slice() -> None:
    sliced = router(capacity_factor=1.0)
    sliced.sequence = Axis((0, 1, 2, 3), 3, None, Clock())  # cp rank 1, tp rank 1 of 2 x 2
    order = torch.tensor([2, 3, 4, 5])
    assert sliced._own_order(2, Pass(rope=None, order=order)).tolist() == [4, 5]
