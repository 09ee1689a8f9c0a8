"""Tensor parallelism: which axis of each weight is split, and the collectives at the boundaries.

A layer enters its split region with every rank holding the whole activation, works on its own
heads or channels, and leaves by adding up partial results. With sequence parallelism the activation
outside is itself split along the sequence: entering gathers it and leaving scatters the sum.
Sources: arXiv 1909.08053 (f and g), 2205.05198 (sequence parallelism).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.train.comm import Axis
from meshwright.train.nn.block import Attention, GeluMLP, SwiGLU
from meshwright.train.nn.decoder import Decoder

_SPLIT_ROWS = ("wq", "wk", "wv", "gate", "up", "embed", "head")
_SPLIT_COLUMNS = ("wo", "down")


def split_dim(name: str) -> int | None:
    """The axis along which tp splits parameter `name`; None where every rank has it whole."""
    *_, module, kind = name.split(".")
    if module in _SPLIT_ROWS:
        return 0
    if module in _SPLIT_COLUMNS and kind == "weight":
        return 1
    return None


def apply_tensor_parallel(model: Decoder, tp: Axis, sequence_parallel: bool) -> None:
    """Cut the (meta) parameters of `model` to this rank's slices and set its boundaries."""
    if tp.size == 1:
        return
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dim = split_dim(f"{module_name}.{name}")
            if dim is not None:
                setattr(module, name, _slice(parameter, dim, tp))
    enter = partial(_through, function=_GatherSequence if sequence_parallel else _Copy, tp=tp)
    leave = partial(_through, function=_ScatterSequence if sequence_parallel else _AddUp, tp=tp)
    for module in model.modules():
        if isinstance(module, Attention | SwiGLU | GeluMLP):
            module.enter, module.leave = enter, leave
    model.enter_head = enter
    if model.first or (model.last and model.spec.tie_embeddings):
        model.embed.leave = leave
        model.embed.first_row = tp.index * model.embed.weight.shape[0]
    if model.first and model.spec.family == "gpt2" and sequence_parallel:
        model.positions.slice_index = tp.index


def _slice(parameter: nn.Parameter, dim: int, tp: Axis) -> nn.Parameter:
    shape = list(parameter.shape)
    shape[dim] //= tp.size
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device=parameter.device))


def _gather(x: Tensor, tp: Axis) -> Tensor:
    """[batch, seq/tp, hidden] of every rank as [batch, seq, hidden]."""
    out = x.new_empty(tp.size, *x.shape)
    tp.all_gather(out.flatten(0, 1), x.contiguous())
    whole: Tensor = out.transpose(0, 1).flatten(1, 2)
    return whole


def _scatter(x: Tensor, tp: Axis) -> Tensor:
    """The sum over ranks of [batch, seq, hidden], this rank's slice [batch, seq/tp, hidden]."""
    slices = x.unflatten(1, (tp.size, -1)).transpose(0, 1).contiguous()
    out: Tensor = slices.new_empty(slices.shape[1:])
    tp.reduce_scatter(out, slices.flatten(0, 1))
    return out


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return _gather(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scatter(grads[0], ctx.tp), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return _scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.tp), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        ctx.tp.all_reduce(grad)
        return grad, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        tp.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _through(x: Tensor, function: Any, tp: Axis) -> Tensor:
    out: Tensor = function.apply(x, tp)
    return out
