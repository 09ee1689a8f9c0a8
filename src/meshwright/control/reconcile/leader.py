"""Which of several services on one database acts: a lease that its holder renews.

The holder stops to act when its lease is over by its own clock, and each transaction of its makes
sure that the lease is still its own: one that was asleep writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, select, update

from meshwright.base.errors import MeshwrightError
from meshwright.control.store.database import Database
from meshwright.control.store.tables import leader

LEASE_S = 3.0
RENEW_S = 0.75
_ROW = 1


class LostLeadError(MeshwrightError):
    """Another service leads: what was about to be written is not."""


class Lead:
    """The wish of the service `me` to lead. `alone`: nobody else can be on this database, so what
    an earlier holder left does not count."""

    def __init__(self, database: Database, me: str, alone: bool) -> None:
        self._database, self._me, self._alone = database, me, alone
        self._until = 0.0  # of the monotonic clock
        self.epoch = 0

    @property
    def mine(self) -> bool:
        """Whether this service may act now."""
        return time.monotonic() < self._until

    def seek(self) -> bool:
        """Take or renew the lease if it can be had; whether it is ours."""
        asked = time.monotonic()
        with self._database.write() as connection:
            now_s = self._database.now_s(connection) or time.time()
            found = connection.execute(select(leader).where(leader.c.id == _ROW)).mappings().first()
            row = {"holder": self._me, "until_s": now_s + LEASE_S}
            if found is None:
                self.epoch = 1
                connection.execute(leader.insert().values(id=_ROW, epoch=1, **row))
            elif found["holder"] == self._me:
                self.epoch = found["epoch"]
                connection.execute(update(leader).values(**row))
            elif self._alone or found["until_s"] < now_s:
                self.epoch = found["epoch"] + 1
                connection.execute(update(leader).values(epoch=self.epoch, **row))
            else:
                self._until = 0.0
                return False
        self._until = asked + LEASE_S
        return True

    def release(self) -> None:
        """Let another one lead at once."""
        if self.mine:
            self._until = 0.0
            with self._database.write() as connection:
                connection.execute(
                    update(leader).where(leader.c.holder == self._me).values(until_s=0.0)
                )

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction of the one that leads. Raises LostLeadError if that is another."""
        with self._database.write() as connection:
            found = connection.execute(select(leader.c.holder, leader.c.epoch)).first()
            if found is None or tuple(found) != (self._me, self.epoch):
                self._until = 0.0
                raise LostLeadError("another service leads now")
            yield connection


def holder(database: Database) -> str | None:
    """Which service leads, as far as is known."""
    with database.read() as connection:
        now_s = database.now_s(connection) or time.time()
        found = connection.execute(select(leader.c.holder, leader.c.until_s)).first()
    return found.holder if found is not None and found.until_s > now_s else None
