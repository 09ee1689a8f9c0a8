"""Workers of the parity check with one thing wrong, to show that the check would see it.

Each entry point breaks the trainer in its own forked process and then runs the real worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from meshwright.base.events import WorkerContext
from meshwright.train import check, gradients, loss, trainer, worker
from meshwright.train.comm import Axis, Pending
from meshwright.train.loss import count_valid
from meshwright.train.mesh import Mesh
from meshwright.train.nn import dropout
from meshwright.train.nn.decoder import Decoder
from meshwright.train.parallel import data, reduce, tensor
from meshwright.train.parallel.flat import FlatGroup


def break_in(owner: Any, name: str, breaker: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by what `breaker` makes of it."""
    setattr(owner, name, breaker(getattr(owner, name)))


def scale_gradients(chosen: Callable[[str], bool], factor: Callable[[Mesh], float]) -> None:
    """The gradients of the parameters whose name is `chosen` are multiplied by `factor`."""

    def breaker(right: Any) -> Any:
        def wrong(groups: list[FlatGroup], mesh: Mesh) -> None:
            right(groups, mesh)
            for group in groups:
                for slot, here, _ in group.spans():
                    if chosen(slot.name):
                        group.grad[here] *= factor(mesh)

        return wrong

    break_in(trainer, "finish_gradients", breaker)


def gradient_scaled_by_tp(context: WorkerContext) -> None:
    """The head gets tp times its gradient."""
    scale_gradients("head.weight".__eq__, lambda mesh: mesh.tp.size)
    check.main(context)


def stage_clipped_by_its_own_norm(context: WorkerContext) -> None:
    """Each pipeline stage scales by the norm of its own gradients."""

    def breaker(right: Any) -> Any:
        def wrong(self: trainer.Trainer, step: int, agreed: gradients.Vote) -> Any:
            squares = sum(float(g.grad.double().square().sum()) for g in self.data.groups)
            norm = math.sqrt(squares) / agreed.tokens
            return right(self, step, replace(agreed, grad_norm=norm))

        return wrong

    break_in(trainer.Trainer, "update", breaker)
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

    break_in(worker, "build_mesh", breaker)
    return found


def _parts_not_summed_over(name: str) -> None:
    axes = _find_axis(name)

    def breaker(right: Any) -> Any:
        def wrong(axis: Axis, parts: list[Tensor]) -> None:
            if axis not in axes:
                right(axis, parts)

        return wrong

    break_in(gradients, "_sum_over", breaker)


def norms_not_summed_over_tp(context: WorkerContext) -> None:
    """Under sequence parallelism each tp rank keeps the norm gradients of its own slice; without
    it, those of what it holds whole inside the split region."""
    _parts_not_summed_over("tp")
    check.main(context)


def tied_ends_not_summed(context: WorkerContext) -> None:
    """Each end of the pipeline updates its copy of the tied table by its own part."""
    _parts_not_summed_over("ends")
    check.main(context)


def tied_ends_of_one_rank_not_summed(context: WorkerContext) -> None:
    """A rank that runs both ends of a V does the same."""
    break_in(gradients, "_sum_tied", lambda _: lambda _ends, _copies: None)
    check.main(context)


def replicas_not_summed(context: WorkerContext) -> None:
    """Replicas of the weights, over dp_replicate or cp, go on with their own gradients."""
    axes = _find_axis("replicas")

    def breaker(right: Any) -> Any:
        def wrong(self: Axis, x: Tensor) -> Pending:
            done: Pending = Pending(None, self.clock) if self in axes else right(self, x)
            return done

        return wrong

    break_in(Axis, "start_all_reduce", breaker)
    check.main(context)


def shards_averaged(context: WorkerContext) -> None:
    """Reduce-scatter takes the mean over the shards, of dp_shard or cp, where the sum is due."""

    def breaker(right: Any) -> Any:
        def wrong(self: Axis, out: Tensor, x: Tensor) -> Pending:
            pending: Pending = right(self, out, x)
            if out.dim() > 1:  # activations, not flat buffers
                return pending

            def finish() -> None:
                pending.wait()
                out.div_(self.size)

            return Pending(None, self.clock, finish)

        return wrong

    break_in(Axis, "start_reduce_scatter", breaker)
    check.main(context)


def one_micro_batch_forgotten(context: WorkerContext) -> None:
    """The gradient of the first micro-batch is thrown away."""
    seen: list[bool] = []

    def breaker(right: Any) -> Any:
        def wrong(self: data.DataParallel, stage: int, last: bool) -> None:
            if len(seen) == 1:
                self.begin_step()
            seen.append(last)
            right(self, stage, last)

        return wrong

    break_in(data.DataParallel, "begin_pass", breaker)
    check.main(context)


def divide_by_own_count() -> None:
    """Each micro-batch's loss becomes its own mean, times what makes the sum come out for equal
    counts."""

    def breaker(right: Any) -> Any:
        def wrong(logits: Tensor, targets: Tensor, tp: Axis, *entropy: Any) -> Any:
            count = max(int(count_valid(targets)), 1)
            return right(logits, targets, tp, *entropy) * (targets.numel() / count)

        return wrong

    break_in(loss, "summed_loss", breaker)


def stage_updated_by_another_rate(context: WorkerContext) -> None:
    """The second pipeline stage takes steps that are 2 % longer."""

    def breaker(right: Any) -> Any:
        def wrong(*args: Any) -> float:
            return float(right(*args)) * (1 + 0.02 * (context.rank >= context.world // 2))

        return wrong

    break_in(trainer, "learning_rate", breaker)
    check.main(context)


def weights_start_by_local_index(context: WorkerContext) -> None:
    """Initial weights drawn by the place in the rank's own slice."""

    def breaker(right: Any) -> Any:
        def wrong(*args: Any) -> Any:
            index = right(*args)
            return index - index[0]

        return wrong

    break_in(data, "global_index", breaker)
    check.main(context)


def partial_sums_scaled(context: WorkerContext) -> None:
    """What leaves a split region is a thousandth too large."""

    def breaker(right: Any) -> Any:
        def wrong(ctx: Any, x: Tensor, how: tensor.TensorParallel) -> Any:
            return right(ctx, x, how) * 1.001

        return staticmethod(wrong)

    break_in(tensor._AddUp, "forward", breaker)
    check.main(context)


def places_counted_from_zero_on_each_rank(context: WorkerContext) -> None:
    """Each context-parallel rank takes its tokens for the first ones of the sequence."""

    def breaker(right: Any) -> Any:
        def wrong(model: Any, places: Tensor) -> Any:
            return right(model, places - places.min())

        return wrong

    break_in(Decoder, "rope_at", breaker)
    check.main(context)


def same_dropout_in_every_step(context: WorkerContext) -> None:
    """The step does not reach the masks."""

    def breaker(right: Any) -> Any:
        def wrong(self: trainer.Trainer, batches: Tensor, step: int) -> Any:
            return right(self, batches, 0 * step)

        return wrong

    break_in(trainer.Trainer, "_draws", breaker)
    check.main(context)


def dropout_by_place_in_the_slice(context: WorkerContext) -> None:
    """Ranks that have other tokens of a sequence drop alike."""

    def breaker(right: Any) -> Any:
        def wrong(draws: Any, name: str, places: Tensor, *sizes: Any) -> Any:
            return right(draws, name, places - places.min(), *sizes)

        return wrong

    break_in(dropout, "dropped", breaker)
    check.main(context)


def dropout_by_sample_of_the_rank(context: WorkerContext) -> None:
    """Data-parallel ranks drop alike."""

    def breaker(right: Any) -> Any:
        def wrong(count: int, layout: Any, _dp_index: int) -> Any:
            return right(count, layout, 0)

        return wrong

    break_in(trainer, "places", breaker)
    check.main(context)


def domains_not_summed(context: WorkerContext) -> None:
    """A hierarchical sum ends at the border of the domain."""

    def breaker(right: Any) -> Any:
        def wrong(self: reduce.Hierarchical, inner: Axis, _outer: Axis) -> None:
            right(self, inner, Axis((context.rank,), 0, None, inner.clock))

        return wrong

    break_in(reduce.Hierarchical, "__init__", breaker)
    check.main(context)
