"""One writer at a time, among the threads of the processes of one service."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from types import TracebackType

from meshwright.base.errors import InputError


class Turn:
    """A context manager over a lock file; waits asleep for as long as another has its turn."""

    def __init__(self, path: Path) -> None:
        """Raises InputError where the file cannot be."""
        self._threads = threading.Lock()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; name another folder") from error

    def __enter__(self) -> None:
        self._threads.acquire()
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._threads.release()

    def close(self) -> None:
        """No more turns."""
        os.close(self._file)
