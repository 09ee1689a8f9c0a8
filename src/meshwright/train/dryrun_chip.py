"""What a chip would do where fake tensors have no answer: fused kernels, balanced routing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from meshwright.train import saved
from meshwright.train.autograd import apply
from meshwright.train.dryrun_recorder import Recorder, attention_flops
from meshwright.train.nn import grouped

Kernels = Literal["fused", "cpu"]

_Patch = tuple[Any, str, Callable[..., Any]]


@contextmanager
def standing_in(recorder: Recorder, rows: int, kernels: Kernels) -> Iterator[None]:
    """In this block a chip is assumed where the trainer asks for one.

    Integers that are read from it are counts of routed rows: `rows` of them, spread evenly. Other
    numbers are 1. With `kernels` = "fused", all experts are one product, RMS norms keep their input
    and one number a row, and attention keeps no scores, also where keys and values have different
    widths or documents a mask; with "cpu" all are torch's CPU operators. Functions are replaced by
    name, since torch's
    own modes for this are off inside of a backward pass, where recomputation is.
    """
    patches = [*_reads(rows), *_memory(recorder)]
    if kernels == "fused":
        patches += _fused(recorder)
    with _patched(patches):
        yield


@contextmanager
def _patched(patches: list[_Patch]) -> Iterator[None]:
    own = [(place, name, vars(place).get(name)) for place, name, _ in patches]
    for place, name, function in patches:
        setattr(place, name, function)
    try:
        yield
    finally:
        for place, name, before in own:
            if before is None:  # inherited
                delattr(place, name)
            else:
                setattr(place, name, before)


def _reads(rows: int) -> Iterator[_Patch]:
    def read(x: Tensor) -> Any:
        if x.is_floating_point():
            return [1.0] * x.numel() if x.dim() else 1.0
        if not x.dim():
            return rows
        spread = even(rows, x.shape[-1])
        return spread if x.dim() == 1 else [spread] * x.shape[0]

    for name in ("tolist", "item", "__int__", "__float__"):
        yield FakeTensor, name, read


def even(total: int, parts: int) -> list[int]:
    """`total` in `parts` that differ by one at most, the larger ones first."""
    share, rest = divmod(total, parts)
    return [share + (part < rest) for part in range(parts)]


def _memory(recorder: Recorder) -> Iterator[_Patch]:
    """Host and chip are one memory here: what moves between them is copied all the same."""
    to_host, plain_to = saved._to_host, Tensor.to

    def onto_host(stays: frozenset[int], x: Tensor) -> Any:
        kept = to_host(stays, x)
        if isinstance(kept, saved._OnHost):
            recorder.mark("host", kept.copy)
        return kept

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = plain_to(x, *args, **kwargs)
        named = bool(args) and isinstance(args[0], torch.device)
        return x.clone() if named and out is x and recorder.part_of(x) == "host" else out

    yield saved, "_to_host", onto_host
    yield FakeTensor, "to", to


def _fused(recorder: Recorder) -> Iterator[_Patch]:
    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **_: Any) -> Tensor:
        return apply(_FusedAttention, q, k, v, attn_mask, recorder)

    def norm(x: Tensor, _shape: Any, weight: Tensor, _eps: float) -> Tensor:
        return apply(_FusedNorm, x, weight)

    def by_rows(a: Tensor, b: Tensor, counts: list[int], own: Any) -> Tensor:
        if own is not None:
            return plain_by_rows(a, b, counts, own)
        recorder.count(2.0 * a.numel() * b.shape[2])
        return a.new_empty(a.shape[0], b.shape[2])

    def weight_gradient(g: Tensor, x: Tensor, counts: list[int], arithmetic: Any) -> Tensor:
        if arithmetic is not None:
            return plain_weight_gradient(g, x, counts, arithmetic)
        recorder.count(2.0 * g.numel() * x.shape[1])
        return g.new_empty(len(counts), g.shape[1], x.shape[1])

    plain_by_rows, plain_weight_gradient = grouped._by_rows, grouped._weight_gradient
    yield grouped, "_by_rows", by_rows
    yield grouped, "_weight_gradient", weight_gradient
    yield grouped, "_runs", lambda _x, _counts: iter((slice(None),))
    yield F, "scaled_dot_product_attention", attention
    yield F, "rms_norm", norm


class _FusedNorm(torch.autograd.Function):
    """Memory of `_fused_rms_norm`: it keeps its input and a reciprocal for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        weight = ctx.saved_tensors[1]
        return torch.empty_like(grads[0]), torch.empty_like(weight)


class _FusedAttention(torch.autograd.Function):
    """Memory of a flash kernel: queries, keys, values, output and the log-sum of each row."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, recorder: Recorder
    ) -> Tensor:
        batch, heads, rows, _ = q.shape
        out = q.new_empty(batch, rows, heads, v.shape[3]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32), mask)
        ctx.recorder = recorder
        recorder.count(attention_flops(q, k, v, causal=True))
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors[:3]
        ctx.recorder.count(2 * attention_flops(q, k, v, causal=True))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None
