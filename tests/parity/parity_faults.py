"""Workers of the parity check with one thing wrong, to show that the check would see it.

Each entry point breaks the trainer in its own forked process and then runs the real worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshwright.base.events import WorkerContext
from meshwright.train import check, gradients, trainer, worker
from meshwright.train.comm import Axis, Pending
from meshwright.train.mesh import Mesh
from meshwright.train.parallel import data, pipeline, tensor
from meshwright.train.parallel.flat import FlatGroup


def _break(owner: Any, name: str, breaker: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by what `breaker` makes of it."""
    setattr(owner, name, breaker(getattr(owner, name)))


def gradient_scaled_by_tp(context: WorkerContext) -> None:
    """The head gets tp times their gradient."""

    def breaker(right: Any) -> Any:
        def wrong(groups: list[FlatGroup], mesh: Mesh) -> None:
            right(groups, mesh)
            for group in groups:
                for slot, here, _ in group.spans():
                    if slot.name == "head.weight":
                        group.grad[here] *= mesh.tp.size

        return wrong

    _break(trainer, "finish_gradients", breaker)
    check.main(context)


def stage_clipped_by_its_own_norm(context: WorkerContext) -> None:
    """Each pipeline stage scales by the norm of its own gradients."""

    def breaker(right: Any) -> Any:
        def wrong(groups: list[FlatGroup], agreed: gradients.Vote, clip: float) -> None:
            own = math.sqrt(sum(float(g.grad.double().square().sum()) for g in groups))
            norm = own / agreed.tokens
            right(groups, gradients.Vote(agreed.loss, agreed.tokens, norm, agreed.stop), clip)

        return wrong

    _break(trainer, "scale_gradients", breaker)
    check.main(context)


def _one_axis_not_summed(axis_name: str, context: WorkerContext) -> None:
    """Gradients that should be summed over the axis `axis_name` of the mesh stay as they are."""
    left_out: list[Axis] = []

    def find_axis(right: Any) -> Any:
        def build(*args: Any) -> Mesh:
            mesh: Mesh = right(*args)
            left_out.append(getattr(mesh, axis_name))
            return mesh

        return build

    def skip_sum(right: Any) -> Any:
        def wrong(axis: Axis, parts: list[Tensor]) -> None:
            if axis is not left_out[0]:
                right(axis, parts)

        return wrong

    def skip_reduction(right: Any) -> Any:
        def wrong(self: Axis, x: Tensor) -> Pending:
            is_gradient = x.dtype.itemsize == 4 and x.numel() > 1
            skip = self is left_out[0] and axis_name == "dp_replicate" and is_gradient
            pending: Pending = Pending(None, self.clock) if skip else right(self, x)
            return pending

        return wrong

    _break(worker, "build_mesh", find_axis)
    _break(gradients, "_sum_over", skip_sum)
    _break(Axis, "start_all_reduce", skip_reduction)
    check.main(context)


def norms_not_summed_over_tp(context: WorkerContext) -> None:
    """Under sequence parallelism each tp rank keeps the norm gradients of its own slice."""
    _one_axis_not_summed("tp", context)


def tied_ends_not_summed(context: WorkerContext) -> None:
    """Each end of the pipeline updates its copy of the tied table by its own part."""
    _one_axis_not_summed("ends", context)


def replicas_not_summed(context: WorkerContext) -> None:
    """Data-parallel replicas go on with their own gradients."""
    _one_axis_not_summed("dp_replicate", context)


def shards_averaged(context: WorkerContext) -> None:
    """Reduce-scatter takes the mean over dp_shard where the sum is due."""

    def breaker(right: Any) -> Any:
        def wrong(self: Axis, out: Tensor, x: Tensor) -> None:
            right(self, out, x)
            if out.dim() == 1:  # flat buffers, not activations
                out /= self.size

        return wrong

    _break(Axis, "reduce_scatter", breaker)
    check.main(context)


def one_micro_batch_forgotten(context: WorkerContext) -> None:
    """The gradient of the first micro-batch is thrown away."""
    seen: list[bool] = []

    def breaker(right: Any) -> Any:
        def wrong(self: data.DataParallel, last: bool) -> None:
            if len(seen) == 1:
                self.begin_step()
            seen.append(last)
            right(self, last)

        return wrong

    _break(data.DataParallel, "begin_backward", breaker)
    check.main(context)


def mean_of_means(context: WorkerContext) -> None:
    """The loss of a rank does not weigh what its tokens weigh."""

    def breaker(right: Any) -> Any:
        def wrong(logits: Tensor, targets: Tensor, tp: Axis) -> Any:
            return right(logits, targets, tp) / (1 + context.rank)

        return wrong

    _break(pipeline, "summed_loss", breaker)
    check.main(context)


def weights_start_by_local_index(context: WorkerContext) -> None:
    """Initial weights drawn by the place in the rank's own slice."""

    def breaker(right: Any) -> Any:
        def wrong(*args: Any) -> Any:
            index = right(*args)
            return index - index[0]

        return wrong

    _break(data, "global_index", breaker)
    check.main(context)


def partial_sums_scaled(context: WorkerContext) -> None:
    """What leaves a split region is a thousandth too large."""

    def breaker(right: Any) -> Any:
        def wrong(ctx: Any, x: Tensor, tp: Axis) -> Any:
            return right(ctx, x, tp) * 1.001

        return staticmethod(wrong)

    _break(tensor._AddUp, "forward", breaker)
    check.main(context)
