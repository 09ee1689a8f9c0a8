"""What was done to a simulated cluster, one line each, in its folder: its machines' own memory.

A line is on its way to the disk before the call that wrote it returns. With the order of the
service, which may have forgotten what is over, it is all that a simulated cluster depends on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.errors import RunError

FILE = "deeds.jsonl"


@dataclass
class Deeds:
    """The lines of one cluster, read again where the file is not as this object left it."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    _size: int = 0

    @classmethod
    def of(cls, home: Path) -> Deeds:
        """Those of the cluster whose folder is `home`."""
        return cls(home / FILE)

    def read(self) -> list[dict[str, Any]]:
        """All of them, in the order in which they were done."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self._size:
            data = self.path.read_bytes() if size else b""
            whole = data[: data.rfind(b"\n") + 1]
            self.lines = [json.loads(line) for line in whole.splitlines()]
            self._size = len(whole)
        return self.lines

    def add(self, deed: Mapping[str, Any]) -> None:
        """Write one down. Raises RunError if the disk does not take it."""
        self.read()
        line = json.dumps(deed, separators=(",", ":")).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("r+b" if self.path.exists() else "w+b") as file:
                file.seek(self._size)  # over a last line that a crash has torn
                file.truncate()
                file.write(line)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror})") from error
        self.lines = [*self.lines, dict(deed)]
        self._size += len(line)
