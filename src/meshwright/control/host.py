"""The half of a service that answers: its database, what engines can say at once, new figures."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from sqlalchemy import Connection

from meshwright.control.engines.engine import Engine
from meshwright.control.figures import FIGURE_NAMES
from meshwright.control.news import Hearer
from meshwright.control.reconcile.leader import holder
from meshwright.control.samples import Recorder, resumed
from meshwright.control.service import requests
from meshwright.control.service.requests import Answer
from meshwright.control.store.database import Database
from meshwright.control.views import ServiceView, at


class Host:
    """What routes work on. The other half, which acts, is at the other end of `line`, and has
    opened the database of `url` before. Engines are asked here only what they can do."""

    def __init__(
        self, home: Path, url: str, me: str, engines: Mapping[str, Engine], line: socket.socket
    ) -> None:
        self.home, self.engines = home, engines
        self._id, self._started_s = me, time.time()
        self.database = Database(url)
        self._hearer = Hearer(line, self._resumed)

    def recorder(self, cluster: str) -> Recorder | None:
        """The figures of a cluster that are in memory: those of the service that leads."""
        return self._hearer.recorder(cluster)

    def wake(self) -> None:
        """Something was asked for."""
        self._hearer.wake()

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
        leader = holder(self.database)
        return ServiceView(
            version=version("meshwright"),
            id=self._id,
            leads=leader == self._id,
            leader=leader,
            started_at=at(self._started_s),
            database="sqlite" if self.database.sqlite else "postgresql",
        )

    def _resumed(self, cluster: str, chips: int, now_s: float) -> Recorder:
        with self.database.read() as connection:
            return resumed(connection, cluster, chips, len(FIGURE_NAMES), now_s)
