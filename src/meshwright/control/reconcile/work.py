"""Long work on clusters: a thread for each that has some, done again from its beginning by whoever
leads after a crash."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.engine import RowMapping
from sqlalchemy.exc import SQLAlchemyError

from meshwright.base.errors import MeshwrightError
from meshwright.control.engines.engine import ClusterOrder, DeployStep, Engine
from meshwright.control.reconcile import orders, rollout
from meshwright.control.reconcile.leader import Lead, LostLeadError
from meshwright.control.reconcile.rollout import Rollout
from meshwright.control.service import software
from meshwright.control.service.clusters import engine_of
from meshwright.control.service.events import tell
from meshwright.control.service.operations import OPEN
from meshwright.control.spec import ClusterSpec
from meshwright.control.store.database import Database
from meshwright.control.store.tables import (
    clusters,
    faults,
    nodes,
    operation_lines,
    operations,
    samples,
)
from meshwright.control.words import ClusterStatus, NodeAction, OperationStatus

_log = logging.getLogger(__name__)


class Work:
    """Operations under way."""

    def __init__(
        self,
        database: Database,
        lead: Lead,
        engines: Mapping[str, Engine],
        home: Path,
        made: Callable[[ClusterOrder], None],
        changed: Callable[[], None],
    ) -> None:
        """`made` is called with a cluster before it is said to be ready, `changed` after each
        operation that has ended."""
        self._database, self._lead, self._engines = database, lead, engines
        self._home, self._made, self._changed = home, made, changed
        self._threads: dict[str, threading.Thread] = {}

    def dispatch(self) -> None:
        """Begin what is to be done and nobody does."""
        self._threads = {key: one for key, one in self._threads.items() if one.is_alive()}
        with self._database.read() as connection:
            query = select(operations).where(operations.c.status.in_(OPEN))
            rows = connection.execute(query.order_by(operations.c.seq)).mappings().all()
        for row in rows:
            if row["cluster_id"] not in self._threads:  # one at a time for a cluster
                thread = threading.Thread(target=self._run, args=(row,), daemon=True)
                self._threads[row["cluster_id"]] = thread
                thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for what goes on, in all so long."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, row: RowMapping) -> None:
        try:
            self._do(row)
        except (LostLeadError, SQLAlchemyError) as error:
            _log.warning("operation %s is done again: %s", row["id"], error)
        except MeshwrightError as error:
            self._fail(row, str(error))
        except Exception as error:  # a fault of an engine must not stop the others
            _log.exception("operation %s", row["id"])
            self._fail(row, f"{type(error).__name__}: {error}")
        finally:
            self._changed()

    def _do(self, row: RowMapping) -> None:
        with self._lead.write() as connection:
            query = select(clusters).where(clusters.c.id == row["cluster_id"])
            cluster = connection.execute(query).mappings().first()
            if cluster is None:  # it went while this waited
                self._end(connection, row, "the cluster is gone")
                return
            values = {"status": OperationStatus.RUNNING}
            connection.execute(
                update(operations).where(operations.c.id == row["id"]).values(**values)
            )
            if row["kind"] == "act" and row["request"]["action"] == NodeAction.REPLACE:
                self._note_replaced(connection, row)
            order = orders.cluster_order(connection, cluster, self._home)
        engine = engine_of(self._engines, ClusterSpec.model_validate(cluster["spec"]))
        figures: dict[str, float] = {}
        for step in self._steps(engine, order, row):
            figures |= step.figures
            self._note(row, step, figures)
        if row["kind"] in ("create", "update"):
            self._made(order)
        self._finish(row, order, figures)

    def _steps(self, engine: Engine, order: ClusterOrder, row: RowMapping) -> Iterator[DeployStep]:
        if row["kind"] == "delete":
            engine.destroy(order)
            return iter(())
        if row["kind"] == "act":
            return engine.act(order, row["request"]["node"], NodeAction(row["request"]["action"]))
        if row["kind"] == software.KIND:
            return Rollout(self._lead, engine, self._home, row, self._changed).steps()
        order.home.mkdir(parents=True, exist_ok=True)
        return engine.deploy(order)

    def _note_replaced(self, connection: Any, row: RowMapping) -> None:
        """Once: the same machine must not be replaced again after a crash."""
        where = (nodes.c.cluster_id == row["cluster_id"]) & (
            nodes.c.number == row["request"]["node"]
        )
        connection.execute(update(nodes).where(where).values(replaced_s=row["created_s"]))

    def _note(self, row: RowMapping, step: DeployStep, figures: Mapping[str, float]) -> None:
        with self._lead.write() as connection:
            line = {"operation_id": row["id"], "ts": time.time()}
            connection.execute(
                operation_lines.insert().values(**line, phase=step.phase, line=step.line)
            )
            values = {"phase": step.phase, "progress": min(1.0, step.progress)}
            connection.execute(
                update(operations)
                .where(operations.c.id == row["id"])
                .values(**values, figures=dict(figures))
            )
            tell(
                connection,
                "operation_progress",
                cluster=row["cluster_id"],
                operation=row["id"],
                data={**values, "line": step.line},
            )

    def _finish(self, row: RowMapping, order: ClusterOrder, figures: dict[str, float]) -> None:
        with self._lead.write() as connection:
            if row["kind"] == "delete":
                for table in (nodes, faults, samples):
                    connection.execute(delete(table).where(table.c.cluster_id == order.id))
                connection.execute(delete(clusters).where(clusters.c.id == order.id))
                tell(connection, "cluster_deleted", cluster=order.id)
            elif row["kind"] == software.KIND:
                rollout.over(connection, row, "")
            elif row["kind"] in ("create", "update"):
                values = {"status": ClusterStatus.READY, "message": "", "figures": figures}
                connection.execute(
                    update(clusters)
                    .where(clusters.c.id == order.id)
                    .values(**values, updated_s=time.time())
                )
                tell(
                    connection,
                    "cluster_status",
                    cluster=order.id,
                    data={"status": ClusterStatus.READY.value},
                )
            self._end(connection, row, "")

    def _fail(self, row: RowMapping, why: str) -> None:
        try:
            with self._lead.write() as connection:
                if row["kind"] in ("create", "update", "delete"):
                    values = {"status": ClusterStatus.FAILED, "message": why}
                    connection.execute(
                        update(clusters).where(clusters.c.id == row["cluster_id"]).values(**values)
                    )
                    tell(
                        connection,
                        "cluster_status",
                        cluster=row["cluster_id"],
                        data={"status": ClusterStatus.FAILED.value, "message": why},
                    )
                elif row["kind"] == software.KIND:
                    rollout.over(connection, row, why)
                self._end(connection, row, why)
        except (LostLeadError, SQLAlchemyError) as error:
            _log.warning("operation %s is done again: %s", row["id"], error)

    def _end(self, connection: Any, row: RowMapping, error: str) -> None:
        status = OperationStatus.FAILED if error else OperationStatus.SUCCEEDED
        values: dict[str, Any] = {"status": status, "error": error, "ended_s": time.time()}
        if not error:
            values |= {"progress": 1.0}
        connection.execute(update(operations).where(operations.c.id == row["id"]).values(**values))
        tell(
            connection,
            "operation_ended",
            cluster=row["cluster_id"],
            operation=row["id"],
            data={"status": status.value, "error": error},
        )
