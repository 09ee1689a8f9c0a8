"""Four ranks that stay up for a test module and attend to parts of sequences, right or broken."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.train.comm import Axis, Clock
from meshwright.train.nn.blockwise import Mask, attend_block
from meshwright.train.parallel import context

RANKS = 4
TIMEOUT_S = 60


@dataclass(frozen=True)
class Case:
    """Inputs from a seed, and how they are attended to."""

    method: context.Method = "ring"
    cp: int = 2
    packed: bool = False
    heads: int = 4
    kv_heads: int = 4
    dim: int = 8
    value_dim: int = 8
    batch: int = 2
    half: bool = False
    perturbed: bool = False
    fault: str = ""
    seq: int = 32

    @property
    def scale(self) -> float:
        """Not the usual one, so that a forgotten scale shows."""
        return 0.7 / math.sqrt(self.dim)

    def documents(self) -> Tensor | None:
        """Two equal documents in the first sequence, shorter ones in the second."""
        if not self.packed:
            return None
        places = torch.arange(self.seq)
        return torch.stack([places // (self.seq // 2), places // 7])[: self.batch]

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v and the gradient of the output, of the whole sequence."""
        generator = torch.Generator().manual_seed(1)
        of_heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        dims = (self.dim, self.dim, self.value_dim, self.value_dim)
        made = [
            torch.randn(self.batch, n, self.seq, dim, generator=generator)
            for n, dim in zip(of_heads, dims, strict=True)
        ]
        if self.perturbed:
            for x in made[:3]:
                x[:, :, : self.seq // 2] += 1.0
        return tuple(x.bfloat16() if self.half else x for x in made)

    def order(self, index: int) -> Tensor:
        """Places of the tokens of a rank."""
        return context.local_order(self.seq, self.cp, index, self.method)


@dataclass(frozen=True)
class Part:
    """What a rank computed for its tokens, and what it did, in order.

    `tensors`: output and gradients of q, k and v, as fp32 arrays. `log`: "send", "wait" or "block",
    and the elements sent or the scores of one head.
    """

    tensors: list[Any]
    log: list[tuple[str, int]]


def attend_part(case: Case, axis: Axis) -> Part:
    """Output and gradients of the rank's part."""
    place = case.order(axis.index)
    q, k, v, grad = (x[:, :, place] for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    log: list[tuple[str, int]] = []
    with broken(case.fault), noted(log):
        attend = context.context_parallel_attend(axis, case.method)
        out = attend(q, k, v, case.documents(), case.scale)
        results = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    return Part([x.float().numpy() for x in results], log)


@contextmanager
def noted(log: list[tuple[str, int]]) -> Iterator[None]:
    """Note what a ring does, in order."""
    send, wait = Axis.send, context._Transfer.wait

    def noted_block(q: Tensor, k: Tensor, *rest: Any) -> Any:
        log.append(("block", q.shape[2] * k.shape[2]))
        return attend_block(q, k, *rest)

    def noted_send(self: Axis, x: Tensor, index: int) -> Any:
        log.append(("send", x.numel()))
        return send(self, x, index)

    def noted_wait(self: Any) -> Tensor:
        log.append(("wait", self.arriving.numel()))
        return wait(self)

    with (
        patch.object(context, "attend_block", noted_block),
        patch.object(context._Transfer, "wait", noted_wait),
        patch.object(Axis, "send", noted_send),
    ):
        yield


def broken(fault: str) -> AbstractContextManager[Any]:
    """The ring with one thing wrong; nothing is wrong without a name."""
    if not fault:
        return nullcontext()
    name, breaker = FAULTS[fault]
    return patch.object(context, name, breaker(getattr(context, name)))


def _merge_without_log_sums(_right: Any) -> Any:
    def merge(out: Tensor, log_sum: Tensor, block_out: Tensor, block_log_sum: Tensor) -> None:
        out.add_(block_out).div_(2)
        log_sum.copy_(torch.logaddexp(log_sum, block_log_sum))

    return merge


def _gradients_lost(right: Any) -> Any:
    """In a half-precision case what travels in fp32 are gradients."""

    def pass_on(x: Tensor, axis: Axis) -> Any:
        return right(torch.zeros_like(x) if x.dtype == torch.float32 else x, axis)

    return pass_on


def _documents_unseen(right: Any) -> Any:
    def block(axis: Axis, hop: int, seq: int, _documents: Tensor | None) -> Any:
        return right(axis, hop, seq, None)

    return block


def _documents_of_own_columns(right: Any) -> Any:
    def block(axis: Axis, hop: int, seq: int, documents: Tensor) -> Any:
        piece, mask = right(axis, hop, seq, documents)
        own = context._early_and_late(documents, axis.size, axis.index)[:, piece.columns]
        return piece, Mask(mask.causal, (mask.documents[0], own))

    return block


def _half_of_a_block_skipped(right: Any) -> Any:
    def piece(seq: int, index: int, holder: int) -> Any:
        found = right(seq, index, holder)
        return replace(found, rows=slice(seq // 2, seq)) if holder < index else found

    return piece


def _ranks_in_reverse(right: Any) -> Any:
    def exchange(axis: Axis, parts: list[Tensor]) -> list[Tensor]:
        return [x.flip(0) for x in right(axis, parts)]

    return exchange


FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "merge forgets log-sums": ("_merge", _merge_without_log_sums),
    "gradients not sent home": ("_pass_on", _gradients_lost),
    "documents unseen": ("_block", _documents_unseen),
    "documents of the wrong columns": ("_block", _documents_of_own_columns),
    "half of a block skipped": ("visible_piece", _half_of_a_block_skipped),
    "ulysses: parts in the wrong order": ("_exchange", _ranks_in_reverse),
}


class Ranks:
    """Processes that run cases together."""

    def __init__(self, folder: Path) -> None:
        # Forked from a process that has imported torch but never used it: one import for all.
        server = get_context("forkserver")
        server.set_forkserver_preload([context.__name__])
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            here, there = server.Pipe()
            arguments = (rank, str(folder / "store"), there)
            process = server.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def run(self, case: Case) -> list[Part]:
        """What each of the first `cp` ranks computed. Raises RuntimeError with a rank's trace."""
        parts: list[Part] = []
        for end in self._ends[: case.cp]:
            end.send(case)
        for rank, end in enumerate(self._ends[: case.cp]):
            if not end.poll(TIMEOUT_S):
                raise RuntimeError(f"rank {rank} does not answer")
            answer = end.recv()
            if isinstance(answer, str):
                raise RuntimeError(answer)
            parts.append(answer)
        return parts

    def stop(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(10)
            process.kill()


def _serve(rank: int, store: str, end: Connection) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT_S // 2)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=limit
    )
    groups = {size: dist.new_group(list(range(size))) for size in (2, RANKS)}
    while True:
        try:
            case = end.recv()
        except EOFError:
            break
        axis = Axis(tuple(range(case.cp)), rank, groups[case.cp], Clock())
        try:
            end.send(attend_part(case, axis))
        except Exception:
            end.send(traceback.format_exc())
    dist.destroy_process_group()
