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
from meshwright.train.loss import count_valid
from meshwright.train.mesh import Mesh
from meshwright.train.parallel import data, pipeline, tensor
from meshwright.train.parallel.flat import FlatGroup


def _break(owner: Any, name: str, breaker: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by what `breaker` makes of it."""
    setattr(owner, name, breaker(getattr(owner, name)))


def gradient_scaled_by_tp(context: WorkerContext) -> None:
    """The head gets tp times its gradient."""

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
        def wrong(self: trainer.Trainer, step: int, agreed: gradients.Vote) -> None:
            squares = sum(float(g.grad.double().square().sum()) for g in self.data.groups)
            norm = math.sqrt(squares) / agreed.tokens
            right(self, step, gradients.Vote(agreed.loss, agreed.tokens, norm, agreed.stop))

        return wrong

    _break(trainer.Trainer, "update", breaker)
    check.main(context)


def _find_axis(name: str) -> list[Axis]:
    """Will hold the axis `name` of this worker's mesh once that is built."""
    found: list[Axis] = []

    def breaker(right: Any) -> Any:
        def build(*args: Any) -> Mesh:
            mesh: Mesh = right(*args)
            found.append(getattr(mesh, name))
            return mesh

        return build

    _break(worker, "build_mesh", breaker)
    return found


def _parts_not_summed_over(name: str) -> None:
    axes = _find_axis(name)

    def breaker(right: Any) -> Any:
        def wrong(axis: Axis, parts: list[Tensor]) -> None:
            if axis not in axes:
                right(axis, parts)

        return wrong

    _break(gradients, "_sum_over", breaker)


def norms_not_summed_over_tp(context: WorkerContext) -> None:
    """Under sequence parallelism each tp rank keeps the norm gradients of its own slice."""
    _parts_not_summed_over("tp")
    check.main(context)


def tied_ends_not_summed(context: WorkerContext) -> None:
    """Each end of the pipeline updates its copy of the tied table by its own part."""
    _parts_not_summed_over("ends")
    check.main(context)


def replicas_not_summed(context: WorkerContext) -> None:
    """Data-parallel replicas go on with their own gradients."""
    axes = _find_axis("dp_replicate")

    def breaker(right: Any) -> Any:
        def wrong(self: Axis, x: Tensor) -> Pending:
            done: Pending = Pending(None, self.clock) if self in axes else right(self, x)
            return done

        return wrong

    _break(Axis, "start_all_reduce", breaker)
    check.main(context)


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


def divide_by_own_count() -> None:
    """Each micro-batch's loss becomes its own mean, times what makes the sum come out for equal
    counts."""

    def breaker(right: Any) -> Any:
        def wrong(logits: Tensor, targets: Tensor, tp: Axis) -> Any:
            count = max(count_valid(targets), 1)
            return right(logits, targets, tp) * (targets.numel() / count)

        return wrong

    _break(pipeline, "summed_loss", breaker)


def stage_updated_by_another_rate(context: WorkerContext) -> None:
    """The second pipeline stage takes steps that are 2 % longer."""

    def breaker(right: Any) -> Any:
        def wrong(*args: Any) -> float:
            return float(right(*args)) * (1 + 0.02 * (context.rank >= context.world // 2))

        return wrong

    _break(trainer, "learning_rate", breaker)
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
