"""Files of a store in memory, which a test may change behind its back."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.checkpoint.files import Body, Entry


class MemoryFiles:
    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if name not in self.held:
            raise FileNotFoundError(name)
        return self.held[name][start:stop]

    def create(self, name: str, parts: Iterable[Body]) -> bool:
        if name in self.held:
            return False
        self.held[name] = b"".join(parts)
        return True

    def names(self, prefix: str) -> list[Entry]:
        return [
            Entry(name, len(content), 0.0)
            for name, content in self.held.items()
            if name.startswith(prefix)
        ]

    def remove(self, name: str) -> None:
        self.held.pop(name, None)
