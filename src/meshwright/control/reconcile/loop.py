"""The one thread that acts, of the one service that leads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from meshwright.control import samples
from meshwright.control.engines.engine import Engine
from meshwright.control.news import Teller
from meshwright.control.reconcile.leader import RENEW_S, Lead, LostLeadError
from meshwright.control.reconcile.runs import Runs
from meshwright.control.reconcile.watch import Watch
from meshwright.control.reconcile.work import Work
from meshwright.control.service import events, requests
from meshwright.control.store.database import Database

_log = logging.getLogger(__name__)

_TICK_S = 0.2
_LOOK_S = 1.0
_CLEAN_S = 60.0
_WAIT_S = 5.0  # for what goes on, when the service ends


class Loop:
    """Start it with `start`, wake it with `wake` when there is something to do, end it with
    `close`; what runs goes on."""

    def __init__(
        self,
        database: Database,
        lead: Lead,
        engines: Mapping[str, Engine],
        home: Path,
        teller: Teller,
    ) -> None:
        self._database, self._lead = database, lead
        self._woken, self._over = threading.Event(), False
        self._runs = Runs(database, lead, engines, home)
        self._watch = Watch(database, lead, engines, home, teller)
        self._work = Work(database, lead, engines, home, self._watch.note_health, self.wake)
        self._due = {"lead": 0.0, "look": 0.0, "clean": 0.0}
        self._thread = threading.Thread(target=self._go, name="reconcile", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Something has changed: look now and not at the next tick."""
        self._woken.set()

    def close(self) -> None:
        """End; another service may lead at once."""
        self._over = True
        self.wake()
        self._thread.join(_WAIT_S)
        self._work.join(_WAIT_S)
        try:
            if self._lead.mine:
                self._watch.flush()
            self._lead.release()
        except (LostLeadError, SQLAlchemyError) as error:
            _log.warning("at the end: %s", error)

    def _go(self) -> None:
        while not self._over:
            try:
                self._tick()
            except LostLeadError:
                _log.warning("another service leads now")
            except SQLAlchemyError as error:
                _log.error("database: %s", error)
            except Exception:  # a fault in one round must not be the last round
                _log.exception("reconcile")
            self._woken.wait(_TICK_S)
            self._woken.clear()

    def _tick(self) -> None:
        if self._is_due("lead", RENEW_S):
            self._lead.seek()
        if not self._lead.mine:
            self._watch.forget()  # figures of who leads are newer
            return
        self._work.dispatch()
        self._watch.faults()
        lost = self._runs.tend()
        if self._is_due("look", _LOOK_S) or lost:
            self._watch.look()  # before chips are given out: a lost run may have had bad ones
        if self._runs.place():
            self.wake()
        if self._is_due("clean", _CLEAN_S):
            with self._lead.write() as connection:
                samples.forget_old(connection, time.time())
                requests.forget_old(connection, time.time())
                events.forget_old(connection, time.time())

    def _is_due(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = max(self._due[what] + every_s, now)
        return True
