"""What engines see of clusters: health by node and chip, figures each second, faults asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.engine import RowMapping

from meshwright.base.errors import InputError, MeshwrightError
from meshwright.control.engines.engine import ClusterOrder, ClusterReport, Engine, NodeReport
from meshwright.control.figures import FIGURE_NAMES
from meshwright.control.news import Teller
from meshwright.control.reconcile import orders
from meshwright.control.reconcile.leader import Lead
from meshwright.control.samples import Chunk, Recorder, keep, resumed
from meshwright.control.service import faults as fault_service
from meshwright.control.service.clusters import engine_of
from meshwright.control.service.events import tell
from meshwright.control.store.database import Database
from meshwright.control.store.tables import faults, nodes
from meshwright.control.words import ClusterStatus, Health, NodeStatus

_log = logging.getLogger(__name__)

_SEEN = (ClusterStatus.READY, ClusterStatus.UPDATING, ClusterStatus.FAILED)
_SEEN_EVERY_S = 10.0  # how often it is written that a node was seen


class Watch:
    """Looks at all clusters, and tells those who answer requests their figures."""

    def __init__(
        self,
        database: Database,
        lead: Lead,
        engines: Mapping[str, Engine],
        home: Path,
        teller: Teller,
    ) -> None:
        self._database, self._lead, self._engines, self._home = database, lead, engines, home
        self._teller = teller
        self._recorders: dict[str, Recorder] = {}
        self._said: dict[str, str] = {}  # the last trouble with an engine, by cluster

    def look(self) -> None:
        """Once, at every cluster."""
        with self._database.read() as connection:
            rows = orders.cluster_rows(connection)
            found = [
                (
                    orders.cluster_order(connection, row, self._home),
                    orders.node_rows(connection, row["id"]),
                )
                for row in rows
                if row["status"] in _SEEN
            ]
        for gone in self._recorders.keys() - {row["id"] for row in rows}:
            del self._recorders[gone]
            self._teller.gone(gone)
        full: list[tuple[str, Chunk]] = []
        for order, known in found:
            if not self._lead.mine:
                return
            full += [(order.id, chunk) for chunk in self._look_at(order, known)]
        self._keep(full)

    def note_health(self, order: ClusterOrder) -> None:
        """Look once at a cluster that has just been made. Raises as its engine."""
        report = engine_of(self._engines, order.spec).observe(order, time.time())
        with self._database.read() as connection:
            known = orders.node_rows(connection, order.id)
        self._compare(order, known, report)

    def flush(self) -> None:
        """Write the figures that are in memory only."""
        self._keep([(key, chunk) for key, one in self._recorders.items() for chunk in one.flush()])

    def forget(self) -> None:
        """Figures of all clusters: another service has them."""
        if self._recorders:
            self._recorders.clear()
            self._teller.gone(None)

    def faults(self) -> None:
        """Do and undo the faults that were asked for."""
        now_s = time.time()
        with self._database.read() as connection:
            open_ones = faults.c.status.in_(
                (fault_service.ASKED, fault_service.ACTIVE, fault_service.CLEARING)
            )
            rows = connection.execute(select(faults).where(open_ones)).mappings().all()
            clusters = {row["id"]: row for row in orders.cluster_rows(connection)}
            due = [row for row in rows if row["cluster_id"] in clusters and _due(row, now_s)]
            found = {
                row["cluster_id"]: orders.cluster_order(
                    connection, clusters[row["cluster_id"]], self._home
                )
                for row in due
            }
        for row in due:
            self._do(row, found[row["cluster_id"]])

    def _do(self, row: RowMapping, order: ClusterOrder) -> None:
        fault = fault_service.as_fault(row)
        message, status = "", fault_service.OVER
        try:
            engine = engine_of(self._engines, order.spec)
            if row["status"] == fault_service.ASKED:
                status = fault_service.ACTIVE
                engine.inject(order, fault)
            else:
                engine.clear(order, fault)
        except InputError as error:
            message, status = str(error), fault_service.REFUSED
        except Exception as error:  # it is asked again
            self._trouble(order.id, str(error))
            return
        with self._lead.write() as connection:
            where = (faults.c.id == row["id"]) & (faults.c.status == row["status"])
            values = {"status": status, "message": message}
            if connection.execute(update(faults).where(where).values(**values)).rowcount:
                words = {"fault": row["id"], "what": row["kind"], **values}
                tell(
                    connection,
                    "fault",
                    cluster=order.id,
                    node=row["node"],
                    chip=row["chip"],
                    data=words,
                )

    def _look_at(self, order: ClusterOrder, known: list[RowMapping]) -> list[Chunk]:
        now_s = time.time()
        try:
            report = engine_of(self._engines, order.spec).observe(order, now_s)
        except MeshwrightError as error:
            self._trouble(order.id, str(error))
            return []
        except Exception as error:  # a fault of one engine must not blind us to the others
            _log.exception("cluster %s", order.id)
            self._trouble(order.id, f"{type(error).__name__}: {error}")
            return []
        self._trouble(order.id, "")
        self._compare(order, known, report)
        if report.sample is None:
            return []
        self._teller.sample(order.id, report.ts, report.sample)
        recorder = self._recorders.get(order.id)
        if recorder is None or recorder.chips != len(report.sample):
            recorder = self._recorder(order.id, len(report.sample), now_s)
            self._recorders[order.id] = recorder
        return recorder.add(report.ts, report.sample)

    def _recorder(self, cluster: str, chips: int, now_s: float) -> Recorder:
        with self._database.read() as connection:
            return resumed(connection, cluster, chips, len(FIGURE_NAMES), now_s)

    def _compare(self, order: ClusterOrder, known: list[RowMapping], report: ClusterReport) -> None:
        by_number = {row["number"]: row for row in known}
        changed = [
            (by_number[node.number], values)
            for node in report.nodes
            if node.number in by_number
            and (values := _news(by_number[node.number], node, order, report.ts))
        ]
        if not changed:
            return
        with self._lead.write() as connection:
            for row, values in changed:
                where = (nodes.c.cluster_id == order.id) & (nodes.c.number == row["number"])
                connection.execute(update(nodes).where(where).values(**values))
                _tell_changes(connection, order.id, row, values)

    def _keep(self, full: list[tuple[str, Chunk]]) -> None:
        if full:
            with self._lead.write() as connection:
                for cluster, chunk in full:
                    keep(connection, cluster, chunk)

    def _trouble(self, cluster: str, message: str) -> None:
        if self._said.get(cluster, "") == message:
            return
        self._said[cluster] = message
        with self._lead.write() as connection:
            tell(connection, "engine_trouble", cluster=cluster, data={"message": message})


def _due(row: RowMapping, now_s: float) -> bool:
    if row["status"] in (fault_service.ASKED, fault_service.CLEARING):
        return True
    return row["until_s"] is not None and row["until_s"] <= now_s


def _news(row: RowMapping, node: NodeReport, order: ClusterOrder, ts: float) -> dict[str, Any]:
    """Columns that are not as they were."""
    status = node.status
    if node.number in order.drained and status is NodeStatus.RUNNING:
        held = any(place[0] == node.number for run in order.runs for place in run.chips)
        status = NodeStatus.DRAINING if held else NodeStatus.DRAINED
    values: dict[str, Any] = {
        "status": status.value,
        "health": node.health.value,
        "chips": [health.value for health in node.chips],
        "links": [health.value for health in node.links] or row["links"],
        "address": node.address,
        "firmware": node.firmware,
        "message": node.message,
    }
    found = {key: value for key, value in values.items() if row[key] != value}
    if status is not NodeStatus.UNKNOWN and ts - (row["seen_s"] or 0.0) > _SEEN_EVERY_S:
        found["seen_s"] = ts
    return found


def _tell_changes(connection: Any, cluster: str, row: RowMapping, values: dict[str, Any]) -> None:
    if "status" in values or "health" in values:
        words = {key: values.get(key, row[key]) for key in ("status", "health", "message")}
        tell(connection, "node_status", cluster=cluster, node=row["number"], data=words)
    for what, kind in (("chips", "chip_health"), ("links", "link_health")):
        for chip, health in enumerate(values.get(what, ())):
            before = row[what][chip] if chip < len(row[what]) else None
            seen_well_at_first = before == Health.UNKNOWN and health == Health.HEALTHY
            if health != before and not seen_well_at_first:
                words = {"health": health, "before": before}
                tell(connection, kind, cluster=cluster, node=row["number"], chip=chip, data=words)
