"""Where activations wait for their backward pass: on the chip, or in the memory of the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

_SMALLEST = 1 << 12  # elements; less is not worth the way


@dataclass(frozen=True)
class ActivationStore:
    """Keeps what autograd saves. With `offload` it waits in the host's memory, in pinned memory
    where the chip has its own; small tensors are left alone, and so is what shares its memory with
    one of `weights`, which stays anyway.

    The copies run on the stream that computes, so that none of their time is hidden: memory is won
    at the price of the whole way there and back."""

    offload: bool
    weights: tuple[Tensor, ...] = ()

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """What forwards in this block save for their backward passes is kept here."""
        if not self.offload or not torch.is_grad_enabled():
            yield
            return
        stays = frozenset(map(_memory, self.weights))
        with torch.autograd.graph.saved_tensors_hooks(partial(_to_host, stays), _from_host):
            yield


@dataclass(frozen=True)
class _OnHost:
    copy: Tensor
    device: torch.device


def _memory(x: Tensor) -> int:
    """Which memory `x` lies in. Autograd saves views of weights, not the parameters themselves; and
    an address will not do, since ZeRO stage 3 frees and fills the memory of weights."""
    memory: int = x.untyped_storage()._cdata
    return memory


def _to_host(stays: frozenset[int], x: Tensor) -> Tensor | _OnHost:
    if x.numel() < _SMALLEST or not x.is_floating_point() or _memory(x) in stays:
        return x
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    # It is read again in the order of the same stream, so nobody need wait for it here.
    copy.copy_(x, non_blocking=True)
    return _OnHost(copy, x.device)


def _from_host(kept: Tensor | _OnHost) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.copy.to(kept.device, non_blocking=True)
