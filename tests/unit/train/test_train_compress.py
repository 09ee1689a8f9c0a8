"""Compressed sums over 2 and 4 gloo ranks, and the codecs alone."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.train.comm import Axis, Clock
from meshwright.train.parallel import compress
from meshwright.train.parallel.compress import Blocks, CodecName, CompressedReduction, codec_of
from meshwright.train.precision.quantise import INT8, Quantised, quantise

CODECS: tuple[CodecName, ...] = get_args(CodecName)
RELATIVE = {"bf16": 2.0**-8, "fp8": 2.0**-4, "int8": 0.0}  # half a unit in the last place
OF_BLOCK = {"bf16": 0.0, "fp8": 2.0**-10 / 448, "int8": 0.5 / 127}  # of a block's largest number
SAVED = {"bf16": 2.0, "fp8": 3.98, "int8": 3.98}
PART = 2500  # of a slice: two blocks and a part, padded on the wire by none
ODD = 4099  # of an all-reduce: divides by nothing
REPEATS = 50
TIMEOUT_S = 60


def numbers(rank: int, count: int, step: int = 0) -> Tensor:
    """Gradients of a rank, of very different size from block to block."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    sizes = torch.logspace(-6, 2, -(-count // 512)).repeat_interleave(512)[:count]
    return torch.randn(count, generator=generator) * sizes


def _on_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout
    )
    axis = Axis(tuple(range(size)), rank, None, Clock())
    results = {codec: _exercise(axis, codec) for codec in CODECS} | {"faults": _with_faults(axis)}
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _exercise(axis: Axis, codec: CodecName) -> dict[str, Any]:
    cpu, size = torch.device("cpu"), axis.size
    scatter = CompressedReduction(axis, codec, PART * size, cpu)
    part = torch.empty(PART)
    x = numbers(axis.index, PART * size)
    pending = scatter.start_reduce_scatter(part, x)
    x.fill_(7.0)  # it may be overwritten at once
    pending.wait()

    every = CompressedReduction(axis, codec, ODD, cpu)
    whole = numbers(axis.index, ODD)
    every.start_all_reduce(whole).wait()

    half = numbers(axis.index, ODD).bfloat16()
    CompressedReduction(axis, codec, ODD, cpu).start_all_reduce(half).wait()
    return {
        "part": part,
        "whole": whole,
        "half": half,
        "scatter": (scatter.wire_bytes, scatter.plain_bytes),
        "every": (every.wire_bytes, every.plain_bytes),
        "bad": _with_an_inf(axis, codec),
    }


def _with_an_inf(axis: Axis, codec: CodecName) -> list[Tensor]:
    """Sums of three steps, the second with an inf on the last rank."""
    every = CompressedReduction(axis, codec, ODD, torch.device("cpu"))
    sums = []
    for step in range(3):
        x = numbers(axis.index, ODD)
        if step == 1 and axis.index == axis.size - 1:
            x[ODD // 2] = float("inf")
        every.start_all_reduce(x).wait()
        sums.append(x)
    return sums


def _mean_of_repeats(axis: Axis) -> Tensor:
    """Mean of the sums of the same numbers, again and again."""
    every = CompressedReduction(axis, "int8", ODD, torch.device("cpu"))
    total = torch.zeros(ODD)
    for _ in range(REPEATS):
        x = numbers(axis.index, ODD)
        every.start_all_reduce(x).wait()
        total += x
    return total / REPEATS


def _with_faults(axis: Axis) -> dict[str, Any]:
    """What int8 gives where a part of it is broken."""

    def hiding(x: Tensor, *args: Any) -> Quantised:
        return quantise(x.nan_to_num(posinf=0.0), *args)

    with patch.object(compress, "codec_of", return_value=Blocks(INT8, feedback=False)):
        no_feedback = _mean_of_repeats(axis)
    with patch.object(Tensor, "nan_to_num_", lambda x, **_: x):
        kept = _with_an_inf(axis, "int8")
    with patch("meshwright.train.parallel.compress.quantise", hiding):
        hidden = _with_an_inf(axis, "int8")
    mean = _mean_of_repeats(axis)
    return {"none": mean, "no feedback": no_feedback, "kept": kept, "hidden": hidden}


Results = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank got."""
    size: int = request.param
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ranks = [context.Process(target=_on_rank, args=(r, size, str(folder))) for r in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_S)
    for process in ranks:
        if process.exitcode is None:
            process.kill()
            process.join()
    assert [process.exitcode for process in ranks] == [0] * size
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def exact(size: int, count: int) -> Tensor:
    return torch.stack([numbers(rank, count).double() for rank in range(size)]).sum(0)


def bound(codec: CodecName, x: Tensor) -> Tensor:
    """Largest error of encoding each number of the slice `x`."""
    blocks = -(-x.numel() // 1024)
    padded = torch.zeros(blocks * 1024).index_copy(0, torch.arange(x.numel()), x.abs())
    largest = padded.view(blocks, -1).amax(1).repeat_interleave(1024)[: x.numel()]
    return RELATIVE[codec] * x.abs() + OF_BLOCK[codec] * largest


def slices(x: Tensor, size: int) -> list[Tensor]:
    """As an all-reduce cuts it."""
    return list(x.split(-(-x.numel() // size)))


@pytest.mark.parametrize("codec", CODECS)
def test_reduce_scatter_is_within_the_codecs_bounds(results: Results, codec: CodecName) -> None:
    size = len(results)
    sums = exact(size, PART * size).split(PART)
    for index, result in enumerate(results):
        terms = (numbers(r, PART * size).split(PART)[index] for r in range(size))
        allowed = torch.stack([bound(codec, x) for x in terms]).sum(0) * 1.001
        error = (result[codec]["part"] - sums[index]).abs()
        assert (error <= allowed).all()
        assert error.max() > 0.1 * allowed.max()  # it was encoded at all


def all_reduce_bound(codec: CodecName, size: int) -> Tensor:
    """Largest error of an all-reduce: of each rank's numbers, and of their sum."""
    total = exact(size, ODD)
    second = torch.cat([bound(codec, x) for x in slices(total.float(), size)])
    terms = (slices(numbers(rank, ODD), size) for rank in range(size))
    first = torch.stack([torch.cat([bound(codec, x) for x in term]) for term in terms]).sum(0)
    # The sum's encoding sees what the first encodings have made of it.
    return 1.1 * (first + second)


@pytest.mark.parametrize("codec", CODECS)
def test_all_reduce_is_within_the_codecs_bounds(results: Results, codec: CodecName) -> None:
    allowed = all_reduce_bound(codec, len(results))
    error = (results[0][codec]["whole"] - exact(len(results), ODD)).abs()
    assert (error <= allowed).all()
    assert error.max() > 0.05 * allowed.max()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["whole", "half"])
def test_all_ranks_end_with_the_same_bits(results: Results, codec: CodecName, name: str) -> None:
    first = results[0][codec][name]
    assert all(torch.equal(result[codec][name], first) for result in results)


@pytest.mark.parametrize("codec", CODECS)
def test_bf16_gradients_are_taken_too(results: Results, codec: CodecName) -> None:
    size, half = len(results), results[0][codec]["half"]
    assert half.dtype == torch.bfloat16
    rounding = 2.0**-8 * torch.stack([numbers(rank, ODD).abs() for rank in range(size)]).sum(0)
    error = (half.float() - exact(size, ODD)).abs()
    assert (error <= all_reduce_bound(codec, size) + 2.2 * rounding).all()


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_saved(results: Results, codec: CodecName) -> None:
    size = len(results)
    for result in results:
        wire, plain = result[codec]["scatter"]
        assert plain == 4 * PART * (size - 1)
        assert plain / wire == pytest.approx(SAVED[codec], rel=0.01)
        wire, plain = result[codec]["every"]
        assert plain == 2 * 4 * -(-ODD // size) * (size - 1)
        assert plain / wire == pytest.approx(SAVED[codec], rel=0.01)


def check_inf(sums: list[Tensor]) -> None:
    """It is seen in its own step, and neither in another slice nor in a later step."""
    before, bad, after = sums
    assert not bad[ODD // 2].isfinite()
    assert bad[0].isfinite()
    assert before.isfinite().all() and after.isfinite().all()


@pytest.mark.parametrize("codec", CODECS)
def test_an_inf_is_seen_by_every_rank_in_its_step(results: Results, codec: CodecName) -> None:
    for result in results:
        check_inf(result[codec]["bad"])


@pytest.mark.parametrize("fault", ["kept", "hidden"])
def test_an_inf_kept_or_hidden_is_noticed(results: Results, fault: str) -> None:
    with pytest.raises(AssertionError):
        check_inf(results[0]["faults"][fault])


def worst_share(mean: Tensor, size: int) -> float:
    """Largest error of the sums `mean`, as a share of the largest number of its block."""
    total = exact(size, ODD)
    shares = [
        float((a - b).abs().max() / b.abs().max())
        for ours, theirs in zip(slices(mean, size), slices(total, size), strict=True)
        for a, b in zip(ours.split(1024), theirs.split(1024), strict=True)
    ]
    return max(shares)


def test_with_feedback_the_mean_converges_and_without_the_bias_stays(results: Results) -> None:
    size = len(results)
    once = worst_share(results[0]["int8"]["whole"], size)
    assert once > 3e-3
    assert worst_share(results[0]["faults"]["none"], size) < 2 * once / REPEATS
    assert worst_share(results[0]["faults"]["no feedback"], size) > 0.9 * once


def test_forgetting_begins_again() -> None:
    """As a restart does; `_encode` alone needs no group."""
    axis = Axis((0, 1), 0, None, Clock())
    reduction = CompressedReduction(axis, "int8", 2 * PART, torch.device("cpu"))
    x = numbers(0, 2 * PART).view(2, -1)
    first, second = (reduction._encode(x, reduction._of_slices) for _ in range(2))
    assert not torch.equal(first, second)
    reduction.forget()
    assert torch.equal(reduction._encode(x, reduction._of_slices), first)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("m", [1, 3, 1024, 1025])
def test_codecs_alone(name: CodecName, m: int) -> None:
    codec = codec_of(name)
    x = numbers(0, 3 * m).view(3, m)
    wire = codec.encode(x)
    assert wire.dtype == torch.uint8 and wire.shape == (3, codec.width(m))
    back = codec.decode(wire, m)
    assert back.dtype == torch.float32 and back.shape == x.shape
    for ours, row in zip(back, x, strict=True):
        assert ((ours - row).abs() <= bound(name, row) * 1.001).all()


def test_one_rank_sends_nothing() -> None:
    reduction = CompressedReduction(Axis((0,), 0, None, Clock()), "int8", 5, torch.device("cpu"))
    x, out = numbers(0, 5), torch.empty(5)
    reduction.start_reduce_scatter(out, x).wait()
    reduction.start_all_reduce(x).wait()
    assert torch.equal(out, numbers(0, 5)) and torch.equal(x, out)
    assert reduction.wire_bytes == reduction.plain_bytes == 0
