"""One service: its home, its database, its engines, and the loop that acts when it leads."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel
from sqlalchemy import Connection

from meshwright.base.errors import InputError
from meshwright.control.engines.engine import Engine
from meshwright.control.reconcile.leader import Lead
from meshwright.control.reconcile.loop import Loop
from meshwright.control.samples import Recorder
from meshwright.control.service import requests
from meshwright.control.service.events import new_id
from meshwright.control.service.requests import Answer
from meshwright.control.store.database import Database, sqlite_file
from meshwright.control.views import ServiceView, at


class Host:
    """A context manager: while it is entered, the service acts; what it has started goes on after.

    `url`: of the database; None for one of SQLite in `home`, which then one service alone uses.
    """

    def __init__(self, home: Path, url: str | None, engines: Mapping[str, Engine]) -> None:
        """Open everything. Raises InputError, one line, for what cannot be."""
        self.home, self.engines = home.resolve(), engines
        self.id, self.started_s = new_id("svc"), time.time()
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = sqlite_file(url) if url else self.home / "service.db"
        alone = file is not None
        self._lock = _hold(file) if file is not None else -1
        self.database = Database(url or f"sqlite:///{self.home / 'service.db'}")
        self.database.upgrade()
        self.lead = Lead(self.database, self.id, alone)
        self._loop = Loop(self.database, self.lead, engines, self.home)

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
        for engine in self.engines.values():
            engine.close()
        self.database.close()
        if self._lock >= 0:
            os.close(self._lock)

    def recorder(self, cluster: str) -> Recorder | None:
        """The figures of a cluster that are in memory: those of the service that leads."""
        return self._loop.recorders.get(cluster)

    def wake(self) -> None:
        """Something was asked for."""
        self._loop.wake()

    def write(
        self,
        what: str,
        key: str | None,
        asked: Mapping[str, Any],
        status: int,
        act: Callable[[Connection], BaseModel],
    ) -> Answer:
        """Do what is asked in one transaction, and return when it is on the disk. With a key, what
        was done by the same request before is answered, and not done again."""
        digest = requests.digest(what, asked)
        with self.database.write() as connection:
            if key and (before := requests.earlier(connection, key, digest)):
                return before
            answer = Answer(status, act(connection).model_dump(mode="json"))
            if key:
                requests.remember(connection, key, digest, answer)
        self.wake()
        return answer

    def describe(self) -> ServiceView:
        """The service itself."""
        return ServiceView(
            version=version("meshwright"),
            id=self.id,
            leads=self.lead.mine,
            leader=self.lead.holder(),
            started_at=at(self.started_s),
            database="sqlite" if self.database.sqlite else "postgresql",
        )


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
