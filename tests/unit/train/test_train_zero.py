"""What each ZeRO stage keeps in memory, and when gradients are added up."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from train_groups import Twins, flat_group

from meshwright.base.errors import RunError
from meshwright.train.parallel.accumulate import Accumulator, Scatters
from meshwright.train.parallel.weights import FullWeights

SHARDS = 4
USED = 4 * 1013 + 3  # of no round size, so that buffers can be told by theirs
SHARD = 1014
HOST = torch.device("cpu")


def _live(numel: int) -> int:
    """How many buffers of `numel` fp32 numbers there are."""
    tensors = [x for x in gc.get_objects() if type(x) is Tensor and x.layout is torch.strided]
    held = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(size == 4 * numel for size in held.values())


def accumulator(stage: int, shards: Twins, scatters: Scatters | None = None) -> Accumulator:
    size = -(-USED // shards.size)
    return Accumulator(
        (USED, size, shards.size),
        torch.float32,
        HOST,
        each_pass=stage >= 2,
        scatter=shards,
        add_up=Twins.of(1),
        scatters=scatters or Scatters(),
    )


def _pass(sums: Accumulator, value: float, last: bool) -> None:
    sums.begin_pass(last, {"a", "b"})
    assert not sums.deliver("a", slice(0, 1000), torch.full((1000,), value))
    assert sums.deliver("b", slice(1000, USED), torch.full((USED - 1000,), value))
    sums.end_pass()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_a_step_are_summed_and_replace_those_before(stage: int) -> None:
    shards = Twins.of(SHARDS if stage else 1)
    scatters, times = Scatters(), SHARDS if stage else 1
    sums = accumulator(stage, shards, scatters)
    for step_value in (1.0, 10.0):
        sums.begin_step()
        for micro_batch, last in ((1.0, False), (2.0, False), (4.0, True)):
            _pass(sums, step_value * micro_batch, last)
        scatters.finish()
        sums.finish()
        assert set(sums.grad[: min(USED, SHARD)].tolist()) == {7.0 * step_value * times}
    each_step = {0: 0, 1: 1, 2: 3, 3: 3}[stage]
    assert shards.scattered == [SHARD * SHARDS] * each_step * 2


@pytest.mark.parametrize(("stage", "between"), [(1, 1), (2, 0), (3, 0)])
def test_full_gradients_live_as_long_as_the_stage_says(stage: int, between: int) -> None:
    scatters = Scatters()
    sums = accumulator(stage, Twins.of(SHARDS), scatters)
    padded = SHARD * SHARDS
    gc.collect()
    assert (_live(SHARD), _live(padded)) == (1, 0)
    sums.begin_step()
    for last in (False, True):
        sums.begin_pass(last, {"a"})
        sums.deliver("a", slice(0, USED), torch.ones(USED))
        scatters.finish()
        assert _live(padded) == (0 if last else between)
    sums.finish()
    assert _live(SHARD) == 1


@pytest.mark.parametrize("stage", [2, 3])
def test_full_gradients_do_not_pile_up_over_a_backward_pass(stage: int) -> None:
    """Eight groups whose scatters are slower than the backward pass."""
    scatters, shards = Scatters(), Twins.of(SHARDS)
    groups = [accumulator(stage, shards, scatters) for _ in range(8)]
    most = 0
    for group in groups:
        group.begin_step()
        _pass(group, 1.0, last=True)
        gc.collect()
        most = max(most, _live(SHARD * SHARDS))
    assert 1 <= most <= 2
    scatters.finish()
    for group in groups:
        group.finish()
        assert set(group.grad[:1000].tolist()) == {float(SHARDS)}


def test_a_missing_gradient_is_an_error() -> None:
    sums = accumulator(2, Twins.of(SHARDS))
    sums.begin_step()
    sums.begin_pass(True, {"a", "b"})
    sums.deliver("a", slice(0, 10), torch.ones(10))
    with pytest.raises(RunError, match="no gradient reached b"):
        sums.end_pass()
    sums.begin_pass(True, {"a"})
    sums.deliver("a", slice(0, 10), torch.ones(10))
    with pytest.raises(KeyError):
        sums.deliver("a", slice(0, 10), torch.ones(10))


@pytest.mark.parametrize(("stage", "kept"), [(1, SHARD * SHARDS), (2, SHARD * SHARDS), (3, 0)])
def test_weights_of_a_group_between_steps(stage: int, kept: int) -> None:
    group = flat_group([("w", torch.ones(USED))], zero=stage, shards=Twins.of(SHARDS))
    assert group.master.numel() == group.grad.numel() == SHARD
    buffer = group.weights.buffer

    def held() -> int:
        return buffer.untyped_storage().nbytes() // 4

    assert held() == kept
    group.weights.gather()
    assert held() == SHARD * SHARDS
    assert set(buffer.tolist()) == {1.0}
    group.master.fill_(3.0)
    group.weights.start_refresh()
    group.weights.finish_refresh()
    assert held() == kept
    group.weights.gather()
    assert set(buffer.tolist()) == {3.0}


@pytest.mark.parametrize(
    ("dtype", "size", "own"),
    [(torch.float32, 1, True), (torch.bfloat16, 1, False), (torch.float32, 2, False)],
)
def test_weights_are_the_master_where_they_can_be(dtype: torch.dtype, size: int, own: bool) -> None:
    master = torch.ones(6)
    weights = FullWeights(master, Twins.of(size), dtype, HOST, frees=False)
    assert (weights.buffer is master) == own
    assert weights.buffer.numel() == 6 * size


def test_a_release_while_gathering_waits_for_it() -> None:
    weights = FullWeights(torch.ones(6), Twins.of(2), torch.float32, HOST, frees=True)
    weights.release()
    weights.start_gather()
    weights.release()
    assert weights.buffer.untyped_storage().nbytes() == 0
    weights.gather()
    assert weights.buffer.tolist() == [1.0] * 12
