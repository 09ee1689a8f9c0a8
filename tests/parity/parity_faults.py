"""Workers of the parity check with one thing wrong, to show that the check would see it.

Each entry point breaks the trainer in its own forked process and then runs the real worker.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from meshwright.base.events import WorkerContext
from meshwright.train import check, gradients, trainer
from meshwright.train.comm import Axis, Pending
from meshwright.train.mesh import Mesh
from meshwright.train.parallel import data, pipeline, tensor
from meshwright.train.parallel.flat import FlatGroup


def gradient_scaled_by_tp(context: WorkerContext) -> None:
    """The weights of one layer's query projection get tp times their gradient."""
    right = trainer.finish_gradients

    def wrong(groups: list[FlatGroup], mesh: Mesh) -> None:
        right(groups, mesh)
        for group in groups:
            for slot, here, _ in group.spans():
                if slot.name == "layers.0.attn.wq.weight":
                    group.grad[here] *= mesh.tp.size

    trainer.finish_gradients = wrong
    check.main(context)


def stage_clipped_by_its_own_norm(context: WorkerContext) -> None:
    """Each pipeline stage scales by the norm of its own gradients."""
    right = trainer.scale_gradients

    def wrong(groups: list[FlatGroup], agreed: gradients.Vote, clip: float) -> None:
        own = math.sqrt(sum(float(g.grad.double().square().sum()) for g in groups))
        alone = gradients.Vote(agreed.loss, agreed.tokens, own / agreed.tokens, agreed.stop)
        right(groups, alone, clip)

    trainer.scale_gradients = wrong
    check.main(context)


def norms_not_summed_over_tp(context: WorkerContext) -> None:
    """Under sequence parallelism each tp rank keeps the norm gradients of its own slice."""
    right = gradients._sum_over

    def wrong(axis: Axis, parts: list[Tensor]) -> None:
        if axis is not _mesh_of(context).tp:
            right(axis, parts)

    _keep_mesh(context)
    gradients._sum_over = wrong
    check.main(context)


def tied_ends_not_summed(context: WorkerContext) -> None:
    """Each end of the pipeline updates its copy of the tied table by its own part."""
    right = gradients._sum_over

    def wrong(axis: Axis, parts: list[Tensor]) -> None:
        if axis is not _mesh_of(context).ends:
            right(axis, parts)

    _keep_mesh(context)
    gradients._sum_over = wrong
    check.main(context)


def replicas_not_summed(context: WorkerContext) -> None:
    """Data-parallel replicas go on with their own gradients."""

    right = Axis.start_all_reduce

    def wrong(self: Axis, x: Tensor) -> Pending:
        replicas = _mesh_of(context).dp_replicate
        return Pending(None, self.clock) if self is replicas else right(self, x)

    _keep_mesh(context)
    Axis.start_all_reduce = wrong  # type: ignore[method-assign]
    check.main(context)


def shards_averaged(context: WorkerContext) -> None:
    """Reduce-scatter takes the mean over dp_shard where the sum is due."""
    right = Axis.reduce_scatter

    def wrong(self: Axis, out: Tensor, x: Tensor) -> None:
        right(self, out, x)
        if out.dim() == 1:  # flat buffers, not activations
            out /= self.size

    Axis.reduce_scatter = wrong  # type: ignore[method-assign]
    check.main(context)


def one_micro_batch_forgotten(context: WorkerContext) -> None:
    """The gradient of the first micro-batch is thrown away."""
    right = data.DataParallel.begin_backward
    seen: list[bool] = []

    def wrong(self: data.DataParallel, last: bool) -> None:
        if len(seen) == 1:
            self.begin_step()
        seen.append(last)
        right(self, last)

    data.DataParallel.begin_backward = wrong  # type: ignore[method-assign]
    check.main(context)


def mean_of_means(context: WorkerContext) -> None:
    """Each rank divides its loss by its own count of tokens and the means are averaged."""
    right = pipeline.summed_loss

    def wrong(logits: Tensor, targets: Tensor, tp: Axis) -> Tensor:
        return right(logits, targets, tp) / (1 + context.rank)

    pipeline.summed_loss = wrong
    check.main(context)


def weights_start_by_local_index(context: WorkerContext) -> None:
    """Initial weights drawn by the place in the rank's own slice."""
    right = data.global_index

    def wrong(slot: Any, start: int, stop: int, device: Any) -> Tensor:
        index = right(slot, start, stop, device)
        return index - index[0]

    data.global_index = wrong
    check.main(context)


def row_bias_added_by_every_rank(context: WorkerContext) -> None:
    """What is left after a row split is summed twice: activations scaled on leaving."""
    right = tensor._AddUp.forward

    def wrong(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        return right(ctx, x, tp) * 1.001

    tensor._AddUp.forward = staticmethod(wrong)  # type: ignore[method-assign]
    check.main(context)


_MESHES: dict[int, Mesh] = {}


def _keep_mesh(context: WorkerContext) -> None:
    """Remember this worker's mesh as soon as its trainer is built."""
    right = trainer.Trainer.__init__

    def remember(self: trainer.Trainer, job: Any, mesh: Mesh, device: Any) -> None:
        _MESHES[context.rank] = mesh
        right(self, job, mesh, device)

    trainer.Trainer.__init__ = remember  # type: ignore[method-assign]


def _mesh_of(context: WorkerContext) -> Mesh:
    return _MESHES[context.rank]
