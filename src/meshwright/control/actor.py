"""The half of a service that acts: it holds the home and, while it leads, sees to everything."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from meshwright.base.errors import InputError
from meshwright.control.engines.engine import Engine
from meshwright.control.news import Teller
from meshwright.control.reconcile.leader import Lead
from meshwright.control.reconcile.loop import Loop
from meshwright.control.store.database import Database, sqlite_file


class Actor:
    """A context manager: while it is entered, the service `me` acts; what it has started goes on
    after.

    `url`: of the database; one of SQLite is used by one service alone. `line`: to the process
    that answers.
    """

    def __init__(
        self, home: Path, url: str, me: str, engines: Mapping[str, Engine], line: socket.socket
    ) -> None:
        """Open everything, and bring tables to this version. Raises InputError, one line, for what
        cannot be."""
        self._engines = engines
        file = sqlite_file(url)
        self._lock = _hold(file) if file is not None else -1
        self._database = Database(url)
        self._database.upgrade()
        lead = Lead(self._database, me, alone=file is not None)
        self._teller = Teller(line, self._wake)
        self._loop = Loop(self._database, lead, engines, home, self._teller)

    def __enter__(self) -> Self:
        self._loop.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.close()
        self._teller.close()
        for engine in self._engines.values():
            engine.close()
        self._database.close()
        if self._lock >= 0:
            os.close(self._lock)

    def _wake(self) -> None:
        self._loop.wake()


def _hold(database: Path) -> int:
    """The lock of a database of one service, for as long as this process lives."""
    path = database.with_name(f".{database.name}.lock")
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; name another folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise InputError(
            f"{database}: another service has it; stop that one, name another folder, or let "
            "several share a database by --db postgresql://..."
        ) from None
    return lock
