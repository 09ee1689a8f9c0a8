"""Bad samples passed over where the job allows it, and always counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

from meshwright.base.errors import DataError


@dataclass
class BadSamples:
    """Those passed over so far, by what was said of each; `allowed` is how many may be, None where
    somebody else counts: of samples that are read again, or by other ranks, all are the same."""

    allowed: int | None = 0
    said: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, error: DataError) -> None:
        """Count one. Raises `error`, or DataError once there are more than allowed."""
        if self.allowed is None:
            return
        with self.lock:
            self.said.append(str(error))
            count = len(self.said)
        if not self.allowed:
            raise error
        if count > self.allowed:
            told = f"{count} bad samples, {self.allowed} are allowed; the last: {error}"
            raise DataError(f"data: {told}") from error
