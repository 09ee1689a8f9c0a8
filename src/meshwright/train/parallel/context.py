"""Context parallelism: each rank holds a part of the sequence, attention still sees all of it.

In a ring, keys and values travel from rank to rank while each attends to those at hand; blocks are
added up by their log-sums, and on the way back the gradients of keys and values travel along and
come home. A rank holds an early and a late chunk, so that under the causal order all have the same
work. Ulysses exchanges parts of the sequence for heads, attends to the whole, and exchanges back.
Sources: arXiv 2310.01889 (ring), 2309.14509 (Ulysses).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.train.comm import Axis, Pending
from meshwright.train.nn.attention import Attend, attend_whole
from meshwright.train.nn.blockwise import Mask, attend_block, attend_block_backward

Method = Literal["ring", "ulysses"]


def local_order(seq_len: int, cp: int, index: int, method: Method) -> Tensor:
    """Places in the whole sequence of the tokens of the rank at `index`: int64 [seq_len / cp].

    Ring: chunks `index` and 2 cp - 1 - `index` of 2 cp; Ulysses: one contiguous part. Raises
    ValueError if `seq_len` does not divide into these.
    """
    ring = method == "ring" and cp > 1
    parts = 2 * cp if ring else cp
    if seq_len % parts:
        raise ValueError(f"a sequence of {seq_len} does not divide into {parts} parts ({method})")
    places = torch.arange(seq_len)
    return _early_and_late(places, cp, index) if ring else places.chunk(cp)[index]


def context_parallel_attend(axis: Axis, method: Method) -> Attend:
    """Attention over the ranks of `axis`, each with the tokens that `local_order` gives it."""
    return ring_attend(axis) if method == "ring" else ulysses_attend(axis)


def ring_attend(axis: Axis) -> Attend:
    """Causal ring attention over `axis`; parts as `local_order` gives them."""

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float) -> Tensor:
        out: Tensor = _differentiable(_RingAttention, q, k, v, documents, scale, axis)
        return out

    return attend


def ulysses_attend(axis: Axis, attend_local: Attend = attend_whole) -> Attend:
    """Causal attention that exchanges sequence for heads over `axis`; parts are contiguous.

    The ranks must divide the query heads, else ValueError. Where they do not divide the key and
    value heads, these are repeated until they do.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float) -> Tensor:
        heads, kv_heads = q.shape[1], k.shape[1]
        if heads % axis.size:
            raise ValueError(f"{heads} heads do not divide over {axis.size} ranks (ulysses)")
        repeats = lcm(kv_heads, axis.size) // kv_heads
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        q, k, v = _differentiable(_ToHeads, axis, q, k, v)
        mixed = attend_local(q, k, v, documents, scale)
        out: Tensor = _differentiable(_ToSequence, axis, mixed)[0]
        return out

    return attend


def _differentiable(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


@dataclass(frozen=True)
class Piece:
    """The part of a block that the causal order leaves: rows of q, columns of k, and whether the
    order still cuts it (along the diagonal) or all of it is seen."""

    rows: slice
    columns: slice
    causal: bool


def visible_piece(seq: int, index: int, holder: int) -> Piece:
    """What the `seq` rows of the rank at `index` see of the columns of the rank at `holder`.

    A rank's own block is cut along the diagonal. Of an earlier rank every row sees the early half;
    a later rank's early chunk and, still later, late chunk lie before this one's late rows alone.
    """
    everything, early, late = slice(0, seq), slice(0, seq // 2), slice(seq // 2, seq)
    if holder == index:
        return Piece(everything, everything, causal=True)
    if holder < index:
        return Piece(everything, early, causal=False)
    return Piece(late, everything, causal=False)


def _early_and_late(x: Tensor, cp: int, index: int) -> Tensor:
    """Of 2 cp chunks of the last dimension, the one at `index` and its mirror image."""
    chunks = x.chunk(2 * cp, dim=-1)
    return torch.cat((chunks[index], chunks[-1 - index]), dim=-1)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        scale: float,
        axis: Axis,
    ) -> Tensor:
        held, shapes = _pack(k, v), (k.shape, v.shape)
        out = log_sum = torch.empty(0)
        for hop in range(axis.size):
            transfer = _pass_on(held, axis) if hop + 1 < axis.size else None
            piece, mask = _block(axis, hop, q.shape[2], documents)
            k_here, v_here = (x[:, :, piece.columns] for x in _unpack(held, shapes))
            block = attend_block(q[:, :, piece.rows], k_here, v_here, mask, scale)
            if hop == 0:
                out, log_sum = block
            else:
                _merge(out[:, :, piece.rows], log_sum[:, :, piece.rows], *block)
            if transfer is not None:
                held = transfer.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, documents, out, log_sum)
        ctx.scale, ctx.axis = scale, axis
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, documents, out, log_sum = ctx.saved_tensors
        axis, held, shapes = ctx.axis, _pack(k, v), (k.shape, v.shape)
        dq = torch.zeros_like(q, dtype=torch.float32)
        # What this rank adds to its own keys and values stays; what it adds to others' travels on.
        home, travelling = torch.empty(0), None
        for hop in range(axis.size):
            transfer = _pass_on(held, axis) if hop + 1 < axis.size else None
            piece, mask = _block(axis, hop, q.shape[2], documents)
            rows, columns = piece.rows, piece.columns
            k_here, v_here = (x[:, :, columns] for x in _unpack(held, shapes))
            grad_rows, q_rows, out_rows, sums = (x[:, :, rows] for x in (grads[0], q, out, log_sum))
            block = attend_block_backward(
                grad_rows, q_rows, k_here, v_here, out_rows, sums, mask, ctx.scale
            )
            dq[:, :, rows] += block[0]
            added = torch.zeros_like(held, dtype=torch.float32)
            for total, part in zip(_unpack(added, shapes), block[1:], strict=True):
                total[:, :, columns] = part
            if hop == 0:
                home = added
            else:
                added = added if travelling is None else added.add_(travelling.wait())
                travelling = _pass_on(added, axis)
            if transfer is not None:
                held = transfer.wait()
        if travelling is not None:
            home += travelling.wait()
        dk, dv = _unpack(home, shapes)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _block(axis: Axis, hop: int, seq: int, documents: Tensor | None) -> tuple[Piece, Mask]:
    """What this rank does at `hop`, when it holds the keys of the rank that many places back."""
    holder = (axis.index - hop) % axis.size
    piece = visible_piece(seq, axis.index, holder)
    if documents is None:
        return piece, Mask(piece.causal)
    of_rows = _early_and_late(documents, axis.size, axis.index)[:, piece.rows]
    of_columns = _early_and_late(documents, axis.size, holder)[:, piece.columns]
    return piece, Mask(piece.causal, (of_rows, of_columns))


def _merge(out: Tensor, log_sum: Tensor, block_out: Tensor, block_log_sum: Tensor) -> None:
    """Add a block of the same rows to `out` and `log_sum`, in place. Every row has seen itself
    before, so `log_sum` is finite; the block's may be -inf."""
    total = torch.logaddexp(log_sum, block_log_sum)
    out.mul_((log_sum - total).exp_()[..., None])
    out.addcmul_(block_out, (block_log_sum - total).exp_()[..., None])
    log_sum.copy_(total)


@dataclass(frozen=True)
class _Transfer:
    """What arrives from the rank before this one, while something goes to the one after."""

    arriving: Tensor
    pending: tuple[Pending, Pending]

    def wait(self) -> Tensor:
        """What has arrived, when both directions are done."""
        for pending in self.pending:
            pending.wait()
        return self.arriving


def _pass_on(x: Tensor, axis: Axis) -> _Transfer:
    """Send `x` to the next rank of the ring and receive the like from the one before.

    Neighbours start with opposite directions: where a device takes transfers in order, two that
    both wait to receive first would wait for ever.
    """
    after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    arriving = torch.empty_like(x)
    if axis.index % 2 == 0:
        sent = axis.send(x, after)
        return _Transfer(arriving, (sent, axis.receive(arriving, before)))
    received = axis.receive(arriving, before)
    return _Transfer(arriving, (axis.send(x, after), received))


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one message: a hop costs one latency."""
    return torch.cat((k.flatten(), v.flatten()))


def _unpack(x: Tensor, shapes: tuple[torch.Size, torch.Size]) -> tuple[Tensor, Tensor]:
    k, v = x.split([shape.numel() for shape in shapes])
    return k.view(shapes[0]), v.view(shapes[1])


def _exchange(axis: Axis, parts: Sequence[Tensor]) -> list[Tensor]:
    """Send slice i of each of `parts` [ranks, ...] to rank i, all in one message, and return what
    came from each rank in the same shapes."""
    leaving = torch.cat([part.flatten(1) for part in parts], dim=1)
    arriving = torch.empty_like(leaving)
    rows = [1] * axis.size
    axis.all_to_all(arriving, leaving, rows, rows)
    widths = [part[0].numel() for part in parts]
    came = arriving.split(widths, dim=1)
    return [x.reshape(part.shape) for x, part in zip(came, parts, strict=True)]


def _to_heads(axis: Axis, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each [batch, heads, seq/cp, dim] as [batch, heads/cp, seq, dim]."""
    leaving = [x.unflatten(1, (axis.size, -1)).transpose(0, 1) for x in xs]
    return tuple(x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in _exchange(axis, leaving))


def _to_sequence(axis: Axis, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each [batch, heads/cp, seq, dim] as [batch, heads, seq/cp, dim]."""
    leaving = [x.unflatten(2, (axis.size, -1)).permute(2, 0, 1, 3, 4) for x in xs]
    return tuple(x.transpose(0, 1).flatten(1, 2) for x in _exchange(axis, leaving))


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return _to_heads(axis, xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_to_sequence(ctx.axis, grads)


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return _to_sequence(axis, xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_to_heads(ctx.axis, grads)
