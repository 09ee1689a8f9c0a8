"""Watches every operator of a run: which memory lives, and how many FLOPs are done."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.plan.parts import PARTS, Part

Phase = Literal["forward", "backward", "recompute"]

_PASSING: tuple[Part, ...] = ("temporary", "travelling")
_OF_A_PASS = frozenset({"tp", "cp", "ep", "sequence"})  # axes whose buffers belong to one pass


@dataclass
class _Block:
    """One allocation."""

    n_bytes: int
    part: Part


@dataclass(eq=False)
class Recorder(TorchDispatchMode):
    """Bytes alive by part, their peak, and FLOPs of matrix products by phase.

    A new allocation is temporary. What is left of a forward or backward when it ends is kept for a
    later one: activations. Buffers of collectives inside a pass are `travelling` until then.
    """

    live: Counter[Part] = field(default_factory=Counter)
    peak: Counter[Part] = field(default_factory=Counter)
    flops: Counter[Phase] = field(default_factory=Counter)
    phase: Phase = "forward"
    flushing: bool = False
    host_peak: int = 0
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _refs: dict[int, Any] = field(default_factory=dict)
    _peak_bytes: int = 0
    _total: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else the first operator would import the compiler: 2.4 s of CPU."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is _DEVICE:  # asked for at every step of autograd: no tensor comes of it
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._watch(out)
        elif isinstance(out, tuple | list):
            for x in out:
                if isinstance(x, Tensor):
                    self._watch(x)
        count = _FLOPS.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.count(count(*args))
        return out

    def count(self, flops: float) -> None:
        """Add `flops` to the phase under way."""
        self.flops[self._phase()] += int(flops)

    def _phase(self) -> Phase:
        node: Any = torch._C._current_autograd_node()
        if node is None or self.flushing:
            return self.phase
        return "recompute" if type(node).__name__.startswith("_Recompute") else "backward"

    def mark(self, part: Part, *tensors: Tensor) -> None:
        """`tensors` are `part`, whatever they were."""
        for tensor in tensors:
            block = self._watch(tensor)
            self._move(block, part)

    def travels(self, axis: str, x: Tensor) -> None:
        """`x` is a buffer of a collective on `axis`; what has a part of its own keeps it."""
        block = self._watch(x)
        if block.part in _PASSING:
            self._move(block, "travelling" if axis in _OF_A_PASS else "communication")

    def keep(self, part: Part = "activations") -> None:
        """A pass is over: what of it is still alive is `part`."""
        for block in list(self._blocks.values()):
            if block.part in _PASSING:
                self._move(block, part)

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Storages that are resized, which no operator does, are seen in this block."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            block = self._blocks.get(storage._cdata)
            if block is not None:
                self._grow(block, size - block.n_bytes)
                block.n_bytes = size
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]

    def part_of(self, x: Tensor) -> Part:
        """What `x` is."""
        return self._watch(x).part

    def parts(self) -> dict[str, int]:
        """Bytes by part on the chip at the peak, in a fixed order."""
        found: dict[str, int] = {part: self.peak[part] for part in PARTS}
        found["communication"] += self.peak["travelling"]
        return found

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        self._peak_bytes, self.peak = self._total, self.live.copy()

    def _watch(self, x: Tensor) -> _Block:
        storage = x.untyped_storage()
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(storage.nbytes(), "temporary")
            self._refs[key] = weakref.ref(storage, lambda _: self._free(key))
            self._grow(block, block.n_bytes)
        return block

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key)
        del self._refs[key]
        self._grow(block, -block.n_bytes)

    def _move(self, block: _Block, part: Part) -> None:
        self._grow(block, -block.n_bytes)
        block.part = part
        self._grow(block, block.n_bytes)

    def _grow(self, block: _Block, n_bytes: int) -> None:
        self.live[block.part] += n_bytes
        if block.part == "host":
            self.host_peak = max(self.host_peak, self.live["host"])
            return
        self._total += n_bytes
        if self._total > self._peak_bytes:
            self._peak_bytes, self.peak = self._total, self.live.copy()


def _matrix_flops(a: Tensor, b: Tensor) -> float:
    """2 for each pair of numbers that a product of matrices (in a batch or not) multiplies."""
    return 2.0 * prod(a.shape) * b.shape[-1]


def attention_flops(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """Scores and their mixing of q, k, v [batch, heads, rows or columns, dim]; half if `causal`."""
    pairs = prod(q.shape[:3]) * k.shape[2]
    return 2.0 * pairs * (q.shape[3] + v.shape[3]) * (0.5 if causal else 1.0)


_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_FLOPS: dict[Any, Callable[..., float]] = {
    _aten.mm: lambda a, b, *_: _matrix_flops(a, b),
    _aten.bmm: lambda a, b, *_: _matrix_flops(a, b),
    _aten.addmm: lambda _bias, a, b, *_: _matrix_flops(a, b),
    _aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, _dropout=0.0, causal=False, *_: attention_flops(q, k, v, causal)
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda _g, q, k, v, _out, _sums, _dropout, causal, *_: 2 * attention_flops(q, k, v, causal)
    ),
}
