"""Reading ahead where a request costs more than bytes do: small chunks lie side by side."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock

from meshwright.checkpoint.files import Body, Entry, Files, ToldFiles
from meshwright.checkpoint.remote import RemoteFiles

WINDOW_BYTES = 4 << 20
_KEPT = 4


class AheadFiles:
    """`files`, of which small reads fetch a window of `window` bytes; the last few are kept."""

    def __init__(self, files: Files, window: int = WINDOW_BYTES) -> None:
        self.files, self.window = files, window
        self._windows: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = Lock()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """As `Files.read`."""
        if stop is None or stop - start > self.window // 2:
            return self.files.read(name, start, stop)
        with self._lock:
            for (of, first), content in self._windows.items():
                if of == name and first <= start and stop <= first + len(content):
                    return content[start - first : stop - first]
            found = self.files.read(name, start, start + self.window)
            self._windows[name, start] = found
            if len(self._windows) > _KEPT:
                self._windows.popitem(last=False)
        return found[: stop - start]

    def create(self, name: str, parts: Iterable[Body]) -> bool:
        """As `Files.create`."""
        return self.files.create(name, parts)

    def names(self, prefix: str) -> list[Entry]:
        """As `Files.names`."""
        return self.files.names(prefix)

    def remove(self, name: str) -> None:
        """As `Files.remove`."""
        self.files.remove(name)


def read_ahead(files: Files) -> Files:
    """The same files, to be read in order; with windows if they are far away."""
    inner = files.files if isinstance(files, ToldFiles) else files
    return AheadFiles(files) if isinstance(inner, RemoteFiles) else files
