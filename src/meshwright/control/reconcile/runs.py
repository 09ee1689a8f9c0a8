"""Jobs that hold chips: started, looked at, stopped; and jobs that wait, placed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select, update
from sqlalchemy.engine import RowMapping
from sqlalchemy.exc import SQLAlchemyError

from meshwright.base.config import to_toml
from meshwright.base.errors import InputError, MeshwrightError
from meshwright.control import runs, scheduler
from meshwright.control.engines.engine import ClusterOrder, Engine, RunOrder
from meshwright.control.reconcile import following, orders
from meshwright.control.reconcile.leader import Lead, LostLeadError
from meshwright.control.reconcile.transitions import Change, Known, Seen, decide
from meshwright.control.service.clusters import engine_of
from meshwright.control.service.events import tell
from meshwright.control.service.jobs import job_file, tell_status
from meshwright.control.store.database import Database
from meshwright.control.store.tables import jobs
from meshwright.control.words import JobStatus, RunState

_log = logging.getLogger(__name__)

_HOLDING = tuple(status for status in JobStatus if status.holds_chips)
_FOLLOW_S = 1.0
_RETRY_S = 2.0  # after an engine could not start a run


@dataclass(frozen=True)
class _Place:
    """Where one run is, for its engine."""

    engine: Engine
    cluster: ClusterOrder
    run: RunOrder


class Runs:
    """What the leading service does for jobs."""

    def __init__(
        self, database: Database, lead: Lead, engines: Mapping[str, Engine], home: Path
    ) -> None:
        self._database, self._lead, self._engines, self._home = database, lead, engines, home
        self._stopped: set[tuple[str, int, bool]] = set()  # whom this process has asked to stop
        self._not_before: dict[str, float] = {}  # by job, of the monotonic clock
        self._tended: dict[str, float] = {}  # by job, when, of the monotonic clock
        self._followed: dict[str, float] = {}  # by job, when, of the monotonic clock
        self._lost = False  # a run, in this round
        self._notes: list[Callable[[Connection], None]] = []  # of this round, to be written

    def place(self) -> bool:
        """Give chips to jobs that wait, if they can be had; whether any were given."""
        with self._database.read() as connection:
            query = select(jobs.c.cluster_id).where(jobs.c.status == JobStatus.QUEUED).distinct()
            wanted = set(connection.execute(query).scalars())
        if not wanted:
            return False
        with self._lead.write() as connection:
            starts = scheduler.schedule(snapshot(connection, wanted))
            for start in starts:
                row = connection.execute(select(jobs).where(jobs.c.id == start.job)).mappings()
                self._begin(connection, row.one(), start)
        return bool(starts)

    def _begin(self, connection: Any, row: RowMapping, start: scheduler.Start) -> None:
        path = job_file(self._home, row["id"])
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(to_toml(row["job"]))
        partial.replace(path)
        values = {
            "status": JobStatus.STARTING,
            "attempt": row["attempt"] + 1,
            "placement": [list(place) for place in start.places],
            "handle": None,
            "moving": 0,
            "attempt_s": time.time(),
            "unknown_since_s": None,
        }
        connection.execute(update(jobs).where(jobs.c.id == row["id"]).values(**values))
        placed = {"status": JobStatus.STARTING.value, "attempt": values["attempt"]}
        placed |= {"placement": values["placement"]}
        tell(connection, "job_status", cluster=row["cluster_id"], job=row["id"], data=placed)

    def tend(self) -> bool:
        """Look at each job that holds chips, once; whether one of them was lost.

        What is seen of all of them is written by one transaction: each waits for the disk.
        """
        self._lost, self._notes = False, []
        with self._database.read() as connection:
            query = select(jobs).where(jobs.c.status.in_(_HOLDING)).order_by(jobs.c.seq)
            rows = list(connection.execute(query).mappings())
            by_id = {row["id"]: row for row in orders.cluster_rows(connection)}
            found = {
                cluster: orders.cluster_order(connection, by_id[cluster], self._home)
                for cluster in {row["cluster_id"] for row in rows} & by_id.keys()
            }
        # Those that were not reached in the last round are the first in this one.
        rows.sort(key=lambda row: self._tended.get(row["id"], 0.0))
        silent: set[str] = set()  # engines that have kept us waiting for nothing in this round
        for row in rows:
            cluster = found.get(row["cluster_id"])
            if cluster is None or not self._lead.mine or cluster.spec.engine in silent:
                continue
            self._tended[row["id"]] = time.monotonic()
            self._tend_safely(row, cluster, silent)
        if self._notes:
            with self._lead.write() as connection:
                for note in self._notes:
                    note(connection)
        return self._lost

    def _tend_safely(self, row: RowMapping, cluster: ClusterOrder, silent: set[str]) -> None:
        """Whatever becomes of one must not keep the others waiting."""
        try:
            engine = engine_of(self._engines, cluster.spec)
            self._tend_one(row, _Place(engine, cluster, orders.run_order(row, self._home)))
        except InputError as error:
            self._change(row, Change(JobStatus.FAILED, str(error)))
        except LostLeadError:
            raise
        except MeshwrightError as error:
            silent.add(cluster.spec.engine)
            self._say(row, str(error))
        except SQLAlchemyError:
            raise
        except Exception as error:
            _log.exception("job %s", row["id"])
            self._say(row, f"{type(error).__name__}: {error}")

    def _tend_one(self, row: RowMapping, place: _Place) -> None:
        begun = row["handle"] is not None
        if not begun and row["stop_asked_s"] is None:
            begun = self._start(row, place)
        seen = self._see(place)
        change = decide(_known(row, begun), seen, time.time())
        if row["stop_asked_s"] is not None or row["moving"]:
            self._stop(row, place, change.hard_stop)
        self._follow(row, now=change.status != row["status"])
        self._change(row, change)

    def _start(self, row: RowMapping, place: _Place) -> bool:
        """Whether it has begun."""
        if time.monotonic() < self._not_before.get(row["id"], 0.0):
            return False
        self._not_before[row["id"]] = time.monotonic() + _RETRY_S
        values = {"handle": dict(place.engine.start(place.cluster, place.run))}
        del self._not_before[row["id"]]
        with self._lead.write() as connection:
            where = (jobs.c.id == row["id"]) & (jobs.c.attempt == row["attempt"])
            connection.execute(update(jobs).where(where).values(**values))
        return True

    def _see(self, place: _Place) -> Seen:
        report = place.engine.look(place.cluster, place.run)
        if report.orphaned:
            place.engine.start(place.cluster, place.run)
        blameless = ""
        if report.state is RunState.FAILED:
            blameless = runs.killed_rank(place.run.run_dir) or ""
        return Seen(report.state, report.message, blameless)

    def _stop(self, row: RowMapping, place: _Place, hard: bool) -> None:
        """Ask once, and once more with force: a run that is asked twice does not save."""
        asked = (row["id"], row["attempt"], hard)
        if asked not in self._stopped:
            place.engine.stop(place.cluster, place.run, hard)
            self._stopped.add(asked)

    def _follow(self, row: RowMapping, now: bool) -> None:
        """Once a second, and when its status changes: before what the service itself tells."""
        read_s = time.monotonic()
        if now or read_s - self._followed.get(row["id"], 0.0) >= _FOLLOW_S:
            self._followed[row["id"]] = read_s
            if news := following.read(self._home, row):
                self._notes.append(partial(following.write, row=row, news=news))

    def _change(self, row: RowMapping, change: Change) -> None:
        message = row["message"] if change.message is None else change.message
        values: dict[str, Any] = {"status": change.status, "message": message}
        values |= {"unknown_since_s": change.unknown_since_s}
        if all(row[key] == value for key, value in values.items()):
            return
        now_s = time.time()
        if change.status is JobStatus.RUNNING and row["running_s"] is None:
            values["running_s"] = now_s
        if change.status.final:
            values["ended_s"] = now_s
        if change.again:
            values |= {"handle": None, "placement": [], "running_s": None}
            values |= {"restarts": row["restarts"] + change.counts}
            self._lost = True
            self._followed.pop(row["id"], None)
        self._notes.append(partial(_note_change, row=row, values=values))

    def _say(self, row: RowMapping, message: str) -> None:
        if row["message"] == message:
            return
        values = {"status": JobStatus(row["status"]), "message": message}
        self._notes.append(partial(_note_change, row=row, values=values))


def _note_change(connection: Connection, row: RowMapping, values: dict[str, Any]) -> None:
    """Unless somebody has asked to stop it since it was read."""
    same = (jobs.c.status == row["status"]) & (jobs.c.attempt == row["attempt"])
    where = (jobs.c.id == row["id"]) & same
    if connection.execute(update(jobs).where(where).values(**values)).rowcount:
        tell_status(connection, row, values["status"], values["message"])


def snapshot(connection: Any, wanted: set[str]) -> scheduler.Snapshot:
    """How things are on some clusters."""
    rows = [row for row in orders.cluster_rows(connection) if row["id"] in wanted]
    states = [orders.cluster_state(row, orders.node_rows(connection, row["id"])) for row in rows]
    active = select(jobs).where(
        jobs.c.cluster_id.in_(wanted), jobs.c.status.in_((*_HOLDING, JobStatus.QUEUED))
    )
    found = [orders.job_state(row) for row in connection.execute(active).mappings()]
    return scheduler.Snapshot(tuple(states), tuple(found))


def _known(row: RowMapping, begun: bool) -> Known:
    return Known(
        begun=begun,
        status=JobStatus(row["status"]),
        attempt_s=row["attempt_s"],
        stop_asked_s=row["stop_asked_s"],
        moving=bool(row["moving"]),
        restarts=row["restarts"],
        max_restarts=row["max_restarts"],
        unknown_since_s=row["unknown_since_s"],
    )
