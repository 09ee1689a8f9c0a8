"""How stored bytes are kept from eyes and hands: a seal over each chunk and each record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshwright.base.errors import CheckpointError

Bytes = bytes | bytearray | memoryview


class SealError(CheckpointError):
    """Sealed bytes do not open: another key, another place than they were sealed for, or damage."""


class Seal(Protocol):
    """Closes and opens bytes. `bound` is authenticated with them and says where they belong."""

    @property
    def key_id(self) -> str | None:
        """Which key it uses; None if it leaves bytes as they are."""

    def seal(self, plain: Bytes, bound: bytes) -> Bytes:
        """`plain`, closed."""

    def open(self, sealed: Bytes, bound: bytes) -> Bytes:
        """What was closed. Raises SealError."""


@dataclass(frozen=True)
class Plain:
    """No seal: both ways give what they get."""

    key_id: str | None = None

    def seal(self, plain: Bytes, bound: bytes) -> Bytes:  # noqa: ARG002
        """`plain` itself."""
        return plain

    def open(self, sealed: Bytes, bound: bytes) -> Bytes:  # noqa: ARG002
        """`sealed` itself."""
        return sealed
