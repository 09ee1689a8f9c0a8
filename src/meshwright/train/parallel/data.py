"""Data parallelism: flat groups over the replicate and shard axes, and the hooks that drive them.

With `dp_shard` > 1 (ZeRO stage 3, FSDP; arXiv 1910.02054, 2304.11277) the weights of a layer are
gathered just before its forward and its backward and freed after; its gradients are
reduce-scattered as soon as its backward is done. Tables and the final norm stay gathered from
their first use until the update. With replicas only, gradients are summed while the backward pass
goes on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.train.init import initial_values
from meshwright.train.mesh import Mesh
from meshwright.train.nn.decoder import Decoder
from meshwright.train.parallel.flat import FlatGroup, Slot, global_index
from meshwright.train.parallel.tensor import split_dim

_INIT_CHUNK = 1 << 22  # elements drawn at a time, to bound the scratch memory


class DataParallel:
    """All flat groups of this rank's part of the model."""

    def __init__(
        self, model: Decoder, mesh: Mesh, dtype: torch.dtype, device: torch.device
    ) -> None:

        def group(modules: dict[str, nn.Module], release_early: bool) -> FlatGroup:
            slots = _slots(model, mesh, modules)
            axes = (mesh.dp_shard, mesh.dp_replicate)
            return FlatGroup(slots, *axes, dtype, device, release_early)

        ends = {name: module for name, module in model.named_children() if name != "layers"}
        # The embedding is a group of its own: a tied head on the last stage must be cut alike.
        embedding = {"embed": ends.pop("embed")} if "embed" in ends else {}
        tables = [group(modules, False) for modules in (embedding, ends) if modules]
        layers = [group({f"layers.{i}": layer}, True) for i, layer in model.layers.items()]
        self.groups = [*tables, *layers]
        if mesh.dp_shard.size > 1:
            model.register_forward_pre_hook(partial(_gather_all, tables))
            for layer, its_group in zip(model.layers.values(), layers, strict=True):
                layer.register_forward_pre_hook(partial(_gather_all, [its_group]))
                layer.register_forward_hook(partial(_after_forward, its_group))

    def initialise(self, model: Decoder, seed: int) -> None:
        """Fill the master shards with the model's initial weights."""
        for group in self.groups:
            for slot, here, part in group.spans():
                for start in range(part.start, part.stop, _INIT_CHUNK):
                    stop = min(start + _INIT_CHUNK, part.stop)
                    index = global_index(slot, start, stop, group.master.device)
                    offset = here.start - part.start
                    values = initial_values(model.spec, seed, slot.name, index)
                    group.master[start + offset : stop + offset] = values
        self.refresh()

    def refresh(self) -> None:
        """After an update of the masters: the weights in use follow."""
        for group in self.groups:
            group.refresh()

    def release(self) -> None:
        """Free what is gathered; an evaluation needs no more of it."""
        for group in self.groups:
            group.release()

    def begin_step(self) -> None:
        """The next gradients replace those of the step before."""
        for group in self.groups:
            group.begin_step()

    def begin_backward(self, last: bool) -> None:
        """Announce the backward pass of one micro-batch, the `last` one of the step or not."""
        for group in self.groups:
            group.begin_backward(last)

    def end_backward(self) -> None:
        """That pass is over. Raises RunError if a parameter got no gradient."""
        for group in self.groups:
            group.end_backward()

    def finish_reduction(self) -> None:
        """Wait until every gradient is the sum over the data-parallel ranks."""
        for group in self.groups:
            group.finish_reduction()


def _slots(model: Decoder, mesh: Mesh, modules: dict[str, nn.Module]) -> list[Slot]:
    """A slot for each parameter below `modules`, which are named from the model's root."""
    return [
        _slot(model, mesh, prefix, module, attribute)
        for top, whole in modules.items()
        for prefix, module in whole.named_modules(prefix=top)
        for attribute, _ in module.named_parameters(recurse=False)
    ]


def _slot(model: Decoder, mesh: Mesh, module_name: str, module: nn.Module, attribute: str) -> Slot:
    name = f"{module_name}.{attribute}"
    shape = tuple(module.get_parameter(attribute).shape)
    whole_shape, offset = list(shape), [0] * len(shape)
    dim = split_dim(name) if mesh.tp.size > 1 else None
    if dim is not None:
        whole_shape[dim] *= mesh.tp.size
        offset[dim] = mesh.tp.index * shape[dim]
    tied = name == "embed.weight" and model.spec.tie_embeddings and mesh.ends.size > 1
    return Slot(
        name=name,
        module=module,
        attribute=attribute,
        shape=shape,
        global_shape=tuple(whole_shape),
        box_offset=tuple(offset),
        decay=len(shape) > 1,
        whole=dim is None,
        tied=tied,
        copy=tied and not model.first,
    )


def _gather_all(groups: list[FlatGroup], *_: Any) -> None:
    for group in groups:
        group.gather()


def _after_forward(group: FlatGroup, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    group.release()
    if not output.requires_grad:
        return output
    gathers: Any = _GatherBeforeBackward
    marked: Tensor = gathers.apply(output, group)
    return marked


class _GatherBeforeBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: FlatGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.group.gather()
        return grads[0], None
