"""The GPU's kernels, called as training calls them, against plain mathematics in fp32 or fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.train.loss import cross_entropy
from meshwright.train.nn.attention import attend_whole
from meshwright.train.nn.blockwise import Mask, attend_block, attend_block_backward
from meshwright.train.nn.grouped import Grouped
from meshwright.train.precision.fp8 import Fp8, Scaling, chip_of, supports_real

pytestmark = pytest.mark.filterwarnings("default")

BF16 = torch.bfloat16


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Numbers from N(0, 1) that bf16 holds exactly, in fp32 on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16).float()


def apart(found: Tensor, expected: Tensor) -> float:
    """Distance relative to what was expected, in the 2-norm."""
    gap = found.detach().cpu().double() - expected.detach().double()
    return float(gap.norm() / expected.detach().double().norm())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_block_of_ring_attention(gpu: torch.device, causal: bool, kv_heads: int) -> None:
    rows, columns, scale, mask = 128, 128 if causal else 64, 0.125, Mask(causal)
    q, grad = drawn(2, 4, rows, 64), drawn(2, 4, rows, 64, seed=1)
    k, v = drawn(2, kv_heads, columns, 64, seed=2), drawn(2, kv_heads, columns, 64, seed=3)
    expected = attend_block(q, k, v, mask, scale)
    q_there, k_there, v_there = (x.to(gpu, BF16) for x in (q, k, v))
    out, log_sum = attend_block(q_there, k_there, v_there, mask, scale)
    assert out.dtype == log_sum.dtype == torch.float32
    assert apart(out, expected[0]) < 1e-2
    assert apart(log_sum, expected[1]) < 1e-3
    read = (grad.to(gpu, BF16), q_there, k_there, v_there, out.to(BF16), log_sum)
    ours = attend_block_backward(*read, mask, scale)
    theirs = attend_block_backward(grad, q, k, v, *expected, mask, scale)
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.shape == wanted.shape
        assert apart(found, wanted) < 2e-2


def test_a_slice_of_rows_is_read_right(gpu: torch.device) -> None:
    whole = [drawn(1, 2, 128, 64, seed=i) for i in range(3)]
    late = slice(64, 128)
    q, k, v = whole[0][:, :, late], whole[1], whole[2]
    expected = attend_block(q.contiguous(), k, v, Mask(), 0.125)
    strided = whole[0].to(gpu, BF16)[:, :, late]
    found = attend_block(strided, k.to(gpu, BF16), v.to(gpu, BF16), Mask(), 0.125)
    assert apart(found[0], expected[0]) < 1e-2
    assert apart(found[1], expected[1]) < 1e-3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("value_dim", [64, 32])
def test_attention_to_a_whole_sequence(
    gpu: torch.device, packed: bool, kv_heads: int, value_dim: int
) -> None:
    q, k = drawn(2, 4, 64, 64), drawn(2, kv_heads, 64, 64, seed=1)
    v = drawn(2, kv_heads, 64, value_dim, seed=2)
    documents = torch.arange(64).div(20, rounding_mode="floor").expand(2, -1) if packed else None
    expected = attend_whole(q, k, v, documents, 0.125)
    inputs = [x.to(gpu, BF16) for x in (q, k, v)]
    on_gpu = None if documents is None else documents.to(gpu)
    found = attend_whole(inputs[0], inputs[1], inputs[2], on_gpu, 0.125)
    assert apart(found, expected) < 1e-2


@pytest.mark.parametrize("counts", [[32, 0, 64, 32], [0, 0, 0, 128], [1, 2, 3, 122]], ids=str)
def test_products_of_experts(gpu: torch.device, counts: list[int]) -> None:
    class Experts(Grouped):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight)

    x, weight, grad = drawn(128, 64), drawn(4, 96, 64, seed=1), drawn(128, 96, seed=2)
    found = []
    for device, dtype in ((torch.device("cpu"), torch.float32), (gpu, BF16)):
        experts = Experts(weight.to(device, dtype, copy=True))
        rows = x.to(device, dtype, copy=True).requires_grad_()
        out = experts.product("weight", rows, counts)
        out.backward(grad.to(device, dtype))
        found.append((out, rows.grad, experts.weight.grad))
    for theirs, ours in zip(*found, strict=True):
        assert ours is not None and theirs is not None
        assert apart(ours, theirs) < 1e-2
    empty = [i for i, count in enumerate(counts) if not count]
    weight_grad = found[1][2]
    assert weight_grad is not None and not weight_grad[empty].any()


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_fp8_units_compute_what_is_emulated(gpu: torch.device, scaling: Scaling) -> None:
    n, m, k = 256, 384, 512
    if not supports_real(chip_of(gpu), (n, k, m), scaling):
        pytest.skip(f"{torch.cuda.get_device_name(gpu)} has no FP8 units for {scaling} scaling")
    x, w, g = (a.to(gpu, BF16) for a in (drawn(n, k), drawn(m, k, seed=1), drawn(n, m, seed=2)))
    real, emulated = Fp8(scaling), Fp8(scaling, emulate=True)
    assert apart(real.forward(x, w), emulated.forward(x, w).cpu()) < 5e-3
    assert apart(real.grad_input(g, w), emulated.grad_input(g, w).cpu()) < 5e-3
    assert apart(real.grad_weight(g, x), emulated.grad_weight(g, x).cpu()) < 5e-3
    assert 1e-3 < apart(real.forward(x, w), x.float().cpu() @ w.float().cpu().t()) < 5e-2


def test_the_compiled_loss_makes_no_fp32_copy_of_the_logits(gpu: torch.device) -> None:
    logits = drawn(2048, 32768).to(gpu, BF16).requires_grad_()
    targets = torch.arange(2048, device=gpu)
    compiled = torch.compile(cross_entropy)
    expected = cross_entropy(logits.detach().float().cpu(), targets.cpu())
    assert apart(compiled(logits, targets), expected) < 1e-4
    torch.cuda.reset_peak_memory_stats(gpu)
    held = torch.cuda.memory_allocated(gpu)
    compiled(logits, targets)
    needed = torch.cuda.max_memory_allocated(gpu) - held
    assert needed < logits.numel() * 2  # an fp32 copy takes 4 bytes a logit
