"""Context parallelism on real ranks equals attention of one rank over the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from context_workers import FAULTS, Case, Part, Ranks, attend_part
from torch import Tensor

from meshwright.train.comm import Axis, Clock
from meshwright.train.nn import blockwise
from meshwright.train.nn.blockwise import Mask, attend_block, attend_block_backward
from meshwright.train.parallel.context import (
    Method,
    local_order,
    ulysses_attend,
    visible_piece,
)

ROUNDING = 3e-6  # largest error of a number of size 1 to 5 in fp32
HALF_ROUNDING = 0.04  # the same where inputs and results are bf16
METHODS: tuple[Method, ...] = ("ring", "ulysses")
ALONE = Axis((0,), 0, None, Clock())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four ranks."""
    up = Ranks(tmp_path_factory.mktemp("ranks"))
    yield up
    up.stop()


def exact(case: Case) -> list[Tensor]:
    """Output and gradients of q, k and v by the definition, in fp64."""
    q, k, v, grad = (x.double() for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
    seen = torch.ones(case.seq, case.seq, dtype=torch.bool).tril()
    documents = case.documents()
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = (case.scale * q @ k.mT).masked_fill(~seen, float("-inf"))
    out = scores.softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def whole(case: Case, parts: list[Part]) -> list[Tensor]:
    """The parts of all ranks in the order of the sequence."""
    back = torch.cat([case.order(index) for index in range(case.cp)]).argsort()
    of_ranks = zip(*(part.tensors for part in parts), strict=True)
    return [torch.cat([torch.from_numpy(x) for x in xs], 2)[:, :, back] for xs in of_ranks]


def errors(case: Case, parts: list[Part]) -> list[float]:
    """Largest error of the output and of the gradients of q, k and v."""
    pairs = zip(whole(case, parts), exact(case), strict=True)
    return [float((mine - right).abs().max()) for mine, right in pairs]


SHAPES: dict[str, dict[str, Any]] = {
    "one width": {},
    "grouped": {"heads": 8, "kv_heads": 2},
    "values wider": {"dim": 6, "value_dim": 12},
    "grouped, values narrower": {"heads": 12, "kv_heads": 3, "dim": 10, "value_dim": 4},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_output_and_gradients_are_those_of_one_rank(
    ranks: Ranks, method: Method, cp: int, packed: bool, shape: str
) -> None:
    case = Case(method, cp, packed, **SHAPES[shape])
    assert max(errors(case, ranks.run(case))) < ROUNDING


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("method", METHODS)
def test_half_precision_is_as_near_as_its_rounding(
    ranks: Ranks, method: Method, packed: bool
) -> None:
    case = Case(method, 4, packed, heads=8, kv_heads=2, half=True)
    assert ROUNDING < max(errors(case, ranks.run(case))) < HALF_ROUNDING


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("method", METHODS)
def test_one_rank_needs_no_others(method: Method, packed: bool) -> None:
    case = Case(method, 1, packed)
    assert max(errors(case, [attend_part(case, ALONE)])) < ROUNDING


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(ranks: Ranks, fault: str) -> None:
    method: Method = "ulysses" if fault.startswith("ulysses") else "ring"
    half = fault == "gradients not sent home"
    case = Case(method, 4, packed="documents" in fault, half=half, fault=fault)
    of_output, *of_gradients = errors(case, ranks.run(case))
    assert max(of_gradients) > 5 * HALF_ROUNDING
    if half:
        assert of_output < HALF_ROUNDING
    else:
        assert of_output > 5 * HALF_ROUNDING


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_one_of_two_documents_changes_half_of_the_outputs(
    ranks: Ranks, cp: int, method: Method
) -> None:
    case = Case(method, cp, packed=True, batch=1)
    assert changed_share(ranks, case) == 0.5


@pytest.mark.parametrize("cp", [2, 4])
def test_a_mask_that_lets_documents_see_each_other_changes_more(ranks: Ranks, cp: int) -> None:
    case = Case("ring", cp, packed=True, batch=1, fault="documents unseen")
    assert changed_share(ranks, case) == 1.0


def changed_share(ranks: Ranks, case: Case) -> float:
    """Part of the tokens whose output changes, by any bit, with the first half of the inputs."""
    outputs = []
    for each in (case, replace(case, perturbed=True)):
        parts = ranks.run(each) if case.cp > 1 else [attend_part(each, ALONE)]
        outputs.append(whole(each, parts)[0])
    changed = (outputs[0] != outputs[1]).transpose(1, 2).flatten(2).any(-1)
    return float(changed.double().mean())


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_a_ring_computes_what_is_visible_and_no_rank_more_than_another(cp: int) -> None:
    seq = 4
    orders = [local_order(seq * cp, cp, index, "ring") for index in range(cp)]
    for index in range(cp):
        for holder in range(cp):
            seen = orders[index][:, None] >= orders[holder][None, :]
            piece = visible_piece(seq, index, holder)
            inside = seen[piece.rows, piece.columns]
            assert int(seen.sum()) == int(inside.sum())
            if holder == index:
                assert piece.causal
                assert torch.equal(inside, torch.ones(seq, seq, dtype=torch.bool).tril())
            else:
                assert not piece.causal
                assert bool(inside.all())
                assert inside.numel() == seq * seq // 2


@pytest.mark.parametrize("cp", [2, 4])
def test_hops_overlap_with_blocks_and_carry_grouped_heads_once(ranks: Ranks, cp: int) -> None:
    case = Case("ring", cp, heads=8, kv_heads=2, value_dim=4)
    seq = case.seq // cp
    size = case.batch * case.kv_heads * seq * (case.dim + case.value_dim)
    for part in ranks.run(case):
        hop = [("send", size), ("block", seq * seq // 2), ("wait", size)]
        forward = [("send", size), ("block", seq * seq), ("wait", size), *hop * (cp - 1)]
        last_hop = [step for step in hop if step[0] == "block"]
        assert part.log[: 3 * cp - 2] == forward[: 3 * (cp - 1)] + last_hop
        # On the way back keys and values hop as often again, and so do their gradients.
        sent = [step for step in part.log if step[0] == "send"]
        assert sent == [("send", size)] * 3 * (cp - 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_parts_of_the_ranks_are_the_sequence(cp: int, method: Method) -> None:
    parts = [local_order(16, cp, index, method) for index in range(cp)]
    assert all(part.dtype == torch.int64 and len(part) == 16 // cp for part in parts)
    assert torch.cat(parts).sort().values.tolist() == list(range(16))


def test_a_ring_gives_an_early_and_a_late_chunk_and_ulysses_one_part() -> None:
    assert local_order(16, 4, 1, "ring").tolist() == [2, 3, 12, 13]
    assert local_order(16, 4, 1, "ulysses").tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(("seq", "method"), [(2999, "ring"), (2999, "ulysses"), (12, "ring")])
def test_a_sequence_that_does_not_divide_is_refused(seq: int, method: Method) -> None:
    with pytest.raises(ValueError, match=f"{seq} does not divide"):
        local_order(seq, 4, 0, method)


def test_ulysses_needs_heads_for_every_rank() -> None:
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="2 heads do not divide over 3 ranks"):
        ulysses_attend(Axis((0, 1, 2), 0, None, Clock()))(q, q, q, None, 1.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq", [64, 100, 200])
def test_plain_blocks_equal_the_fused_ones(
    seq: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across the tiles of a long block, which the short sequences above do not have."""
    q, k, v, grad = Case(heads=4, kv_heads=2, seq=seq).inputs()
    mask, results = Mask(causal), []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(blockwise, "_fused", lambda *_: False)
        out, log_sum = attend_block(q, k, v, mask, 0.3)
        of_inputs = attend_block_backward(grad, q, k, v, out, log_sum, mask, 0.3)
        results.append((out, log_sum, *of_inputs))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


def test_a_row_that_sees_nothing_adds_nothing() -> None:
    q, k, v, grad = Case(batch=1).inputs()
    mine, others = torch.zeros(1, 32, dtype=torch.int64), torch.ones(1, 32, dtype=torch.int64)
    mask = Mask(documents=(mine, others))
    out, log_sum = attend_block(q, k, v, mask, 1.0)
    assert not out.any()
    assert bool((log_sum == float("-inf")).all())
    for x in attend_block_backward(grad, q, k, v, out, torch.zeros_like(log_sum), mask, 1.0):
        assert not x.any()


def test_the_fused_kernel_of_a_gpu_is_called_as_this_torch_wants() -> None:
    """Without a GPU only names, arguments and shapes can be tried: tensors without data."""
    q = torch.empty(2, 8, 16, 64, device="meta", dtype=torch.bfloat16)
    k = torch.empty(2, 8, 16, 64, device="meta", dtype=torch.bfloat16)
    mask = Mask(causal=True)
    out, log_sum = blockwise._fused_forward(q, k, k, mask, 0.125)
    assert (out.shape, log_sum.shape) == (q.shape, q.shape[:3])
    grads = blockwise._fused_backward(q, q, k, k, out.to(q.dtype), log_sum, mask, 0.125)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
