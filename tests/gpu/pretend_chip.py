"""A chip that is not there: tensors that say they lie on it and hold their numbers on the CPU.

An operation that mixes them with the CPU's fails as it would with CUDA, and what does run gives the
CPU's numbers. So a machine without a GPU proves that a program puts its tensors where they belong,
and how often it waits for the chip. What asks whether a device is CUDA's goes its other way here.
A process can pretend once, and cannot stop: tests do it in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "chip"
_COPIES = ("copy_", "_to_copy")  # may have tensors of both
# What makes the CPU wait for a GPU: to read a number, or to learn how large a result is.
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique2")


def pretend() -> torch.device:
    """The chip, from now on a device of this process."""
    _setup_privateuseone_for_python_backend(NAME)
    return torch.device(NAME, 0)


class OnChip(Tensor):
    """A tensor of the chip; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnChip:
        made: OnChip = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        """The one that holds the numbers: to free it frees them."""
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        """Through `cpu`, since torch would read the memory of the outer tensor."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's own leaves the function out
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} on {types} outside of `Pretending`")


@dataclass
class Traffic:
    """How often the CPU waited for the chip, and elements that were copied to the host while it
    went on."""

    waits: int = 0
    streamed: int = 0


class Pretending(TorchDispatchMode):
    """Inside this block the chip works."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = Traffic()
        self._lifted = False

    def __enter__(self) -> Pretending:
        # `torch.tensor` makes its tensor on the CPU first; else it would not pass by here.
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifted)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        ours = [x for x in tensors if isinstance(x, OnChip)]
        device = kwargs.get("device")
        to_chip = bool(ours) if device is None else torch.device(device).type == NAME
        if name in _COPIES:
            self._count_copy(name, tensors, to_chip)
        elif ours:
            _check_together(name, tensors)
            self.traffic.waits += name in _WAITS
        if device is not None and to_chip:
            kwargs["device"] = torch.device("cpu")
        inner, named = tree_map_only(OnChip, lambda x: x.held, (args, kwargs))
        out = func(*inner, **named)
        if name == "copy_":
            return args[0]
        if not to_chip:
            return out
        out = tree_map_only(Tensor, lambda x: x if isinstance(x, OnChip) else OnChip(x), out)
        return return_and_correct_aliasing(func, args, kwargs, out)

    def _count_copy(self, name: str, tensors: list[Tensor], to_chip: bool) -> None:
        target_here = not (isinstance(tensors[0], OnChip) if name == "copy_" else to_chip)
        if target_here and isinstance(tensors[-1], OnChip):
            if name == "copy_":
                self.traffic.streamed += tensors[-1].numel()
            else:
                self.traffic.waits += 1


def _check_together(name: str, tensors: list[Tensor]) -> None:
    """As on CUDA, only a single number may come from the CPU."""
    strangers = [x for x in tensors if not isinstance(x, OnChip) and x.dim()]
    if strangers:
        here, there = len(strangers), len(tensors) - len(strangers)
        raise RuntimeError(f"{name}: {there} tensors on the chip with {here} on the CPU")
