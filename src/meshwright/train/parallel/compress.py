"""Gradients added up over an axis in fewer bytes: encoded on the wire, summed in fp32.

- "bf16": half the bytes of fp32.
- "fp8": E4M3 with an fp32 scale for each 1024 numbers; a quarter.
- "int8": as fp8, with error feedback: what an encoding loses is added to the numbers of the next
  one, so that over the steps nothing is lost (arXiv 1809.07599; 2102.02888).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from meshwright.train.comm import Axis, Pending
from meshwright.train.precision.quantise import E4M3, INT8, Format, Quantised, Tile, quantise

CodecName = Literal["bf16", "fp8", "int8"]

_BLOCK = 1024
_SCALE_BYTES = 4


class Codec(Protocol):
    """Slices of fp32 numbers to bytes and back; what is not finite stays so."""

    @property
    def feedback(self) -> bool:
        """Whether what an encoding loses is to be kept for the next."""

    def width(self, m: int) -> int:
        """Bytes of a slice of `m` numbers."""

    def encode(self, x: Tensor) -> Tensor:
        """fp32 [slices, m] as uint8 [slices, width(m)]."""

    def decode(self, wire: Tensor, m: int) -> Tensor:
        """uint8 [slices, width(m)] as fp32 [slices, m]."""


@dataclass(frozen=True)
class Bf16:
    """The upper half of fp32."""

    feedback: bool = False

    def width(self, m: int) -> int:
        """Bytes of a slice of `m` numbers."""
        return 2 * m

    def encode(self, x: Tensor) -> Tensor:
        """fp32 [slices, m] as uint8 [slices, 2 m]."""
        return x.to(torch.bfloat16).view(torch.uint8)

    def decode(self, wire: Tensor, m: int) -> Tensor:
        """uint8 [slices, 2 m] as fp32 [slices, m]."""
        return wire[:, : 2 * m].view(torch.bfloat16).float()


@dataclass(frozen=True)
class Blocks:
    """Eight bits a number and an fp32 scale a block of 1024; a slice is its scales, its numbers,
    and up to three bytes that keep the next slice's scales aligned."""

    form: Format
    feedback: bool

    def width(self, m: int) -> int:
        """Bytes of a slice of `m` numbers."""
        return self._scales(m) + m + -m % _SCALE_BYTES

    def encode(self, x: Tensor) -> Tensor:
        """fp32 [slices, m] as uint8 [slices, width(m)]."""
        slices, m = x.shape
        quantised = quantise(x, Tile(1, _BLOCK), self.form)
        wire = x.new_zeros(slices, self.width(m), dtype=torch.uint8)
        start = self._scales(m)
        wire[:, :start] = quantised.scale.view(torch.uint8)
        wire[:, start : start + m] = quantised.values.view(torch.uint8)
        return wire

    def decode(self, wire: Tensor, m: int) -> Tensor:
        """uint8 [slices, width(m)] as fp32 [slices, m]."""
        start = self._scales(m)
        scale = wire[:, :start].view(torch.float32)
        values = wire[:, start : start + m].view(self.form.dtype)
        return Quantised(values, scale, Tile(1, _BLOCK)).dequantise()

    @staticmethod
    def _scales(m: int) -> int:
        return -(-m // _BLOCK) * _SCALE_BYTES


def codec_of(name: CodecName) -> Codec:
    """The codec of that name."""
    if name == "bf16":
        return Bf16()
    return Blocks(E4M3, feedback=False) if name == "fp8" else Blocks(INT8, feedback=True)


class CompressedReduction:
    """Sums of flat buffers of `numel` numbers over `axis`; one object for each buffer.

    Slices travel encoded, each rank adds up its slice in fp32 in rank order, and for an all-reduce
    the sum travels encoded again, so that all ranks end with the same bits. `wire_bytes` counts
    what this rank has sent to others, `plain_bytes` what the same exchange takes in fp32.

    With error feedback it keeps `numel` fp32 numbers, for an all-reduce one more slice. They are
    no part of a checkpoint: a restart begins from zero and loses what one step's encoding lost,
    and so is not bit-equal to the run without it. They have the scale of what was reduced; call
    `forget` when that changes.
    """

    def __init__(self, axis: Axis, codec: CodecName, numel: int, device: torch.device) -> None:
        self._axis, self._numel, self._codec = axis, numel, codec_of(codec)
        self._part = -(-numel // axis.size)  # numbers of one slice
        self.wire_bytes = 0
        self.plain_bytes = 0
        self._of_slices = self._of_sum = None
        if self._codec.feedback and axis.size > 1:
            self._of_slices = torch.zeros(axis.size, self._part, device=device)
            self._of_sum = torch.zeros(1, self._part, device=device)

    def forget(self) -> None:
        """Drop what earlier encodings lost."""
        for residual in (self._of_slices, self._of_sum):
            if residual is not None:
                residual.zero_()

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        """`out` [n] becomes this rank's slice of the sum of `x` [size * n], once waited for.

        `x` holds `numel` numbers and may be overwritten when this returns.
        """
        if self._axis.size == 1:
            out.copy_(x)
            return Pending(None, self._axis.clock)
        under_way, received = self._exchange(x.view(self._axis.size, -1))

        def finish() -> None:
            under_way.wait()
            out.copy_(self._decode(received).sum(dim=0).view_as(out))

        return Pending(None, self._axis.clock, finish)

    def start_all_reduce(self, x: Tensor) -> Pending:
        """`x` becomes the sum, in place, once waited for; any `numel` will do.

        The second half starts when the first is waited for, so ranks must wait in the same order.
        """
        if self._axis.size == 1:
            return Pending(None, self._axis.clock)
        slices = x.new_zeros(self._axis.size * self._part, dtype=torch.float32)
        slices[: self._numel] = x.flatten()
        under_way, received = self._exchange(slices.view(self._axis.size, -1))

        def finish() -> None:
            under_way.wait()
            part = self._decode(received).sum(dim=0, keepdim=True)
            wire = self._encode(part, self._of_sum)
            gathered = torch.empty_like(received)
            self._axis.all_gather(gathered, wire)
            x.copy_(self._decode(gathered).flatten()[: self._numel].view_as(x))

        return Pending(None, self._axis.clock, finish)

    def _exchange(self, slices: Tensor) -> tuple[Pending, Tensor]:
        """Send each rank its slice; what this rank gets has the same form, in rank order."""
        wire = self._encode(slices.float(), self._of_slices)
        received = torch.empty_like(wire)
        ones = [1] * self._axis.size
        return self._axis.start_all_to_all(received, wire, ones, ones), received

    def _encode(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The wire of `x`, and what it loses kept in `residual`; both ways of an exchange send one
        slice to each other rank."""
        others = self._axis.size - 1
        self.wire_bytes += others * self._codec.width(self._part)
        self.plain_bytes += others * self._part * x.element_size()
        if residual is None:
            return self._codec.encode(x)
        whole = x + residual
        wire = self._codec.encode(whole)
        # A block that is not finite is a skipped step, not a loss to make up for.
        lost = (whole - self._decode(wire)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        residual.copy_(lost)
        return wire

    def _decode(self, wire: Tensor) -> Tensor:
        return self._codec.decode(wire, self._part)
