"""Data parallelism: flat groups over the replica and shard axes, and the hooks that drive them.

In ZeRO stage 3 the weights of a layer are gathered just before its forward and its backward, while
the layer before is still computing, and freed after; tables and the final norm stay gathered from
their first use until the update. Gradients are reduced in the background as soon as the backward
pass of a layer is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.train.autograd import apply
from meshwright.train.comm import Axis
from meshwright.train.init import initial_values
from meshwright.train.mesh import Mesh
from meshwright.train.nn.decoder import Decoder
from meshwright.train.nn.linear import WeightGradients
from meshwright.train.parallel.accumulate import Scatters
from meshwright.train.parallel.compress import CompressedReduction
from meshwright.train.parallel.flat import Copies, FlatGroup, Slot, Storage, global_index
from meshwright.train.parallel.reduce import replica_reduction, shard_reduction
from meshwright.train.parallel.slots import is_expert, slots_of

_INIT_CHUNK = 1 << 22  # elements drawn at a time, to bound the scratch memory


class DataParallel:
    """All flat groups of this rank's parts of the model: `stages` names its pipeline stages."""

    def __init__(
        self, stages: dict[int, Decoder], mesh: Mesh, storage: Storage, later: WeightGradients
    ) -> None:
        self._mesh, self._storage, self._later = mesh, storage, later
        self._scatters = Scatters()
        self._compressed: list[CompressedReduction] = []
        self._of_stage = {stage: self._build(model) for stage, model in stages.items()}
        self.groups = [group for groups in self._of_stage.values() for group in groups]

    def _build(self, model: Decoder) -> list[FlatGroup]:
        """The groups of one stage; with hooks that gather them where they are freed."""
        ends = {name: module for name, module in model.named_children() if name != "layers"}
        # The embedding is a group of its own: a tied head on another stage must be cut alike.
        embedding = {"embed": ends.pop("embed")} if "embed" in ends else {}
        tables = [
            self._group(slots_of(model, self._mesh, modules), release_early=False)
            for modules in (embedding, ends)
            if modules
        ]
        layers = [
            list(self._layer_groups(slots_of(model, self._mesh, {f"layers.{i}": layer})))
            for i, layer in model.layers.items()
        ]
        if self._storage.zero == 3:
            model.register_forward_pre_hook(partial(_gather_all, tables, []))
            for i, layer in enumerate(model.layers.values()):
                after = layers[i + 1] if i + 1 < len(layers) else []
                before = layers[i - 1] if i else []
                layer.register_forward_pre_hook(partial(_gather_all, layers[i], after))
                layer.register_forward_hook(partial(_after_forward, layers[i], before))
        return [*tables, *(group for groups in layers for group in groups)]

    def _layer_groups(self, slots: list[Slot]) -> Iterator[FlatGroup]:
        """A layer's groups: its experts have axes of their own."""
        for experts in (False, True):
            mine = [slot for slot in slots if is_expert(slot) == experts]
            if mine:
                yield self._group(mine, release_early=True)

    def _group(self, slots: list[Slot], release_early: bool) -> FlatGroup:
        mesh, layout, device = self._mesh, self._mesh.layout, self._storage.device
        experts = is_expert(slots[0])
        axes = mesh.experts if experts else mesh
        numel = sum(slot.numel for slot in slots)
        shard = -(-numel // axes.shards.size)
        alone = Axis((mesh.rank,), 0, None, mesh.clock)
        copies = Copies(
            scatters=self._scatters,
            shards=axes.shards,
            replicas=axes.replicas,
            scatter=shard_reduction(axes.shards, layout, shard * axes.shards.size, device),
            add_up=replica_reduction(
                axes.replicas,
                (alone, alone) if experts else mesh.levels,
                layout,
                shard,
                device,
                in_order=experts,
            ),
        )
        both = (copies.scatter, copies.add_up)
        self._compressed += [r for r in both if isinstance(r, CompressedReduction)]
        return FlatGroup(slots, copies, self._storage, self._later, release_early)

    def initialise(self, stages: dict[int, Decoder], seed: int) -> None:
        """Fill the master shards with the model's initial weights."""
        spec = next(iter(stages.values())).spec
        for group in self.groups:
            for slot, here, part in group.spans():
                for start in range(part.start, part.stop, _INIT_CHUNK):
                    stop = min(start + _INIT_CHUNK, part.stop)
                    index = global_index(slot, start, stop, group.master.device)
                    offset = here.start - part.start
                    values = initial_values(spec, seed, slot.name, index)
                    group.master[start + offset : stop + offset] = values
        self.refresh()

    def refresh(self) -> None:
        """After an update of the masters: the weights in use follow."""
        for group in self.groups:
            group.weights.start_refresh()
        for group in self.groups:
            group.weights.finish_refresh()

    def release(self) -> None:
        """Free what is gathered; an evaluation needs no more of it."""
        for group in self.groups:
            group.weights.release()

    def begin_step(self) -> None:
        """The next gradients replace those of the step before."""
        self._scatters.forget_sums()
        for group in self.groups:
            group.sums.begin_step()

    def release_layers(self, stage: int) -> None:
        """Free the layers of `stage`: what is left of its backward pass needs no weights."""
        for group in self._of_stage[stage]:
            group.release_early()

    def begin_pass(self, stage: int, last: bool) -> None:
        """Announce the gradients of one micro-batch on `stage`, the `last` one of the step or
        not."""
        for group in self._of_stage[stage]:
            group.begin_pass(last)

    def end_pass(self, stage: int) -> None:
        """They have all come. Raises RunError if a parameter got none."""
        for group in self._of_stage[stage]:
            group.sums.end_pass()

    def take_compressed_bytes(self) -> tuple[float, float]:
        """Bytes that compressed reductions have sent since the last call, and what fp32 would have
        sent."""
        wire = sum(reduction.wire_bytes for reduction in self._compressed)
        plain = sum(reduction.plain_bytes for reduction in self._compressed)
        for reduction in self._compressed:
            reduction.wire_bytes = reduction.plain_bytes = 0
        return float(wire), float(plain)

    def forget_compression_losses(self) -> None:
        """Gradients have another scale from now on: what was lost before is of no use."""
        for reduction in self._compressed:
            reduction.forget()

    def abandon(self) -> None:
        """Forget what a step that was interrupted has left under way; `refresh` must follow."""
        self._scatters.abandon()
        for group in self.groups:
            group.sums.abandon()
            group.weights.abandon()

    def keep_own_sums(self, undisturbed: Callable[[], AbstractContextManager[object]]) -> None:
        """From now on remember what is added up over replicas; see `Scatters`."""
        self._scatters.undisturbed = undisturbed

    def sum_again(self) -> None:
        """Add up over replicas anew what this step has begun to add up."""
        self._scatters.sum_again()

    def forget_sums(self) -> None:
        """The step of the present sums counts, or not: they are not begun again."""
        self._scatters.forget_sums()

    def finish_scatters(self) -> None:
        """Wait until this rank's shards are sums over those of its replica."""
        self._scatters.finish()

    def finish_reduction(self) -> None:
        """Wait until every gradient is the sum over the ranks that hold the same weights."""
        for group in self.groups:
            group.sums.finish()


def _gather_all(groups: list[FlatGroup], upcoming: list[FlatGroup], *_: Any) -> None:
    for group in groups:
        group.weights.gather()
    for group in upcoming:
        group.weights.start_gather()


def _after_forward(
    groups: list[FlatGroup],
    before: list[FlatGroup],
    _module: nn.Module,
    _inputs: Any,
    output: Tensor,
) -> Tensor:
    for group in groups:
        group.weights.release()
    if not output.requires_grad:
        return output
    return apply(_GatherBeforeBackward, output, groups, before)


class _GatherBeforeBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: list[FlatGroup], before: list[FlatGroup]) -> Tensor:
        ctx.groups, ctx.before = groups, before
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _gather_all(ctx.groups, ctx.before)
        return grads[0], None, None
