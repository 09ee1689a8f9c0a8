"""Tensor parallelism: which axis of each weight is split, and the collectives at the boundaries.

A layer enters its split region with every rank holding the whole activation, works on its own
heads or channels, and leaves by adding up partial results. With sequence parallelism the activation
outside is itself split along the sequence: entering gathers it and leaving scatters the sum. The
backward pass makes weight gradients while the input's gradient is on its way.
Sources: arXiv 1909.08053 (f and g), 2205.05198 (sequence parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.train.autograd import apply
from meshwright.train.comm import Axis
from meshwright.train.nn.attention import Attention, LatentAttention
from meshwright.train.nn.boundary import Boundary, stay
from meshwright.train.nn.decoder import Decoder
from meshwright.train.nn.feed_forward import GeluMLP, SwiGLU
from meshwright.train.nn.linear import WeightGradients

_SPLIT_ROWS = ("wq", "wk", "wv", "wq_up", "wkv_up", "gate", "up", "embed", "head")
_SPLIT_COLUMNS = ("wo", "down")
# Held whole but used inside the split region, where each rank sees only its part of the gradient.
_INSIDE = ("q_norm", "k_norm", "router")


@dataclass(frozen=True)
class TensorParallel:
    """The tp axis of this rank, and whether activations outside are split along the sequence."""

    tp: Axis
    sequence_parallel: bool
    later: WeightGradients


def split_dim(name: str) -> int | None:
    """The axis along which tp splits parameter `name`; None where every rank has it whole.

    Stacked experts are not split here: `parallel/expert.py` shares them out.
    """
    *_, module, kind = name.split(".")
    if module in _SPLIT_ROWS:
        return 0
    if module in _SPLIT_COLUMNS and kind == "weight":
        return 1
    return None


def is_partial(name: str, sequence_parallel: bool) -> bool:
    """Whether each tp rank sees only a part of the gradient of `name`, which it holds whole."""
    *_, module, _ = name.split(".")
    return sequence_parallel or module in _INSIDE


def apply_tensor_parallel(model: Decoder, how: TensorParallel) -> None:
    """Cut the (meta) parameters of `model` to this rank's slices and set its boundaries."""
    tp = how.tp
    if tp.size == 1:
        return
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dim = split_dim(f"{module_name}.{name}")
            if dim is not None:
                setattr(module, name, _slice(parameter, dim, tp))
    enter, leave = boundaries(how)
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention | SwiGLU | GeluMLP):
            module.enter, module.leave = enter, leave
    model.enter_head = enter
    if model.first or (model.last and model.spec.tie_embeddings):
        model.embed.leave = leave
        model.embed.first_row = tp.index * model.embed.weight.shape[0]
    if model.first and model.spec.family == "gpt2" and how.sequence_parallel:
        model.positions.slice_index, model.positions.slices = tp.index, tp.size


def boundaries(how: TensorParallel) -> tuple[Boundary, Boundary]:
    """How activations enter a split region and how they leave it."""
    if how.tp.size == 1:
        return stay, stay
    if how.sequence_parallel:
        return _Boundary(_GatherSequence, how), _Boundary(_ScatterSequence, how)
    return _Boundary(_Copy, how), _Boundary(_AddUp, how)


def _slice(parameter: nn.Parameter, dim: int, tp: Axis) -> nn.Parameter:
    shape = list(parameter.shape)
    shape[dim] //= tp.size
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device=parameter.device))


def gather_sequence(x: Tensor, tp: Axis) -> Tensor:
    """[batch, seq/tp, hidden] of every rank as [batch, seq, hidden]."""
    out = x.new_empty(tp.size, *x.shape)
    tp.all_gather(out.flatten(0, 1), x.contiguous())
    whole: Tensor = out.transpose(0, 1).flatten(1, 2)
    return whole


def scatter_sequence(x: Tensor, how: TensorParallel) -> Tensor:
    """The sum over ranks of [batch, seq, hidden], this rank's slice [batch, seq/tp, hidden]."""
    slices = x.unflatten(1, (how.tp.size, -1)).transpose(0, 1).contiguous()
    out: Tensor = slices.new_empty(slices.shape[1:])
    pending = how.tp.start_reduce_scatter(out, slices.flatten(0, 1))
    how.later.overlap()
    pending.wait()
    return out


@dataclass(frozen=True)
class _Boundary:
    """An autograd function with the settings that it takes."""

    function: type[torch.autograd.Function]
    how: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        return apply(self.function, x, self.how)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: TensorParallel) -> Tensor:
        ctx.how = how
        return gather_sequence(x, how.tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return scatter_sequence(grads[0], ctx.how), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: TensorParallel) -> Tensor:
        ctx.how = how
        return scatter_sequence(x, how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_sequence(grads[0], ctx.how.tp), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: TensorParallel) -> Tensor:
        ctx.how = how
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        pending = ctx.how.tp.start_all_reduce(grad)
        ctx.how.later.overlap()
        pending.wait()
        return grad, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, how: TensorParallel) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        how.tp.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
