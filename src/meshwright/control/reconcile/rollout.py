"""The steps of an operation that gives a cluster other software, batch by batch.

What is done is in the tables: a node has the software or not, and is drained or not. So whoever
leads after a crash begins anew, finds the batches that are done, and goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, update
from sqlalchemy.engine import RowMapping

from meshwright.base.errors import RunError
from meshwright.control.engines.engine import ClusterOrder, DeployStep, Engine
from meshwright.control.reconcile import orders
from meshwright.control.reconcile.leader import Lead
from meshwright.control.service import clusters
from meshwright.control.service.events import tell
from meshwright.control.store.tables import clusters as cluster_table
from meshwright.control.store.tables import nodes
from meshwright.control.words import ClusterStatus, JobStatus, NodeAction, NodeStatus

LEAVE_S = 600.0  # jobs may take so long to save and leave
BACK_S = 120.0  # a node whose self-test was good is seen again by then
_BACK = (NodeStatus.RUNNING, NodeStatus.DRAINING, NodeStatus.DRAINED)
_POLL_S = 0.2


def batches(numbers: Sequence[int], size: int) -> list[list[int]]:
    """The same for the same operation, however often it is begun."""
    return [list(numbers[at : at + size]) for at in range(0, len(numbers), size)]


@dataclass(frozen=True)
class Rollout:
    """One such operation, by its row. `sleep` and `leave_s` are for tests."""

    lead: Lead
    engine: Engine
    home: Path
    row: RowMapping
    changed: Callable[[], None]
    sleep: Callable[[float], None] = time.sleep
    leave_s: float = LEAVE_S

    @property
    def _asked(self) -> dict[str, Any]:
        return dict(self.row["request"])

    def steps(self) -> Iterator[DeployStep]:
        """Do it. Raises RunError for a node that fails; that one stays drained, and the rest of
        its batch takes work again."""
        asked, done, begun = self._asked, 0, False
        total = max(1, len(asked["nodes"]))
        for batch in batches(asked["nodes"], asked["batch"]):
            pending = self._pending(batch)
            if pending and begun and asked["wait_s"]:
                yield DeployStep("wait", f"{asked['wait_s']:g} s to the next batch", done / total)
                self._wait(asked["wait_s"])
            done += len(batch) - len(pending)
            for step in self._batch(batch, pending):
                yield replace(step, progress=(done + len(pending) * step.progress) / total)
            done += len(pending)
            begun = begun or bool(pending)

    def _batch(self, batch: Sequence[int], pending: Sequence[int]) -> Iterator[DeployStep]:
        failing = -1
        try:
            if pending:
                yield DeployStep("drain", f"nodes {_list(pending)} take no more work", 0.0)
                self._drain(pending)
                self._wait_empty(pending)
            for index, node in enumerate(pending):
                failing = node
                for step in self.engine.act(self._order(), node, NodeAction.REBOOT):
                    yield DeployStep(step.phase, step.line, index / len(pending))
                self._wait_back(node)
                self._updated(node)
                failing = -1
        finally:
            self._resume([node for node in batch if node != failing])
        if pending:
            line = f"nodes {_list(pending)} have {self._asked['software']}"
            yield DeployStep("resume", line, 1.0)

    def _pending(self, batch: Sequence[int]) -> list[int]:
        with self.lead.write() as connection:
            rows = orders.node_rows(connection, self.row["cluster_id"])
        wanted = self._asked["software"]
        return [r["number"] for r in rows if r["number"] in batch and r["software"] != wanted]

    def _order(self) -> ClusterOrder:
        """As it is now: jobs have moved since."""
        with self.lead.write() as connection:
            cluster = clusters.row_of(connection, self.row["cluster_id"])
            return orders.cluster_order(connection, cluster, self.home)

    def _drain(self, numbers: Sequence[int]) -> None:
        with self.lead.write() as connection:
            for number in numbers:
                self._set(connection, number, drained=1)
                clusters.move_jobs(connection, self.row["cluster_id"], number)
        self.changed()

    def _wait_empty(self, numbers: Sequence[int]) -> None:
        deadline = time.monotonic() + self.leave_s
        while held := self._held(numbers):
            if time.monotonic() > deadline:
                raise RunError(
                    f"job {held}: has not left nodes {_list(numbers)} after {self.leave_s:g} s; "
                    "stop it, then ask for the software again"
                )
            self._wait(_POLL_S)

    def _wait_back(self, number: int) -> None:
        """Or else the next batch would be drained while jobs cannot come here yet."""
        deadline = time.monotonic() + BACK_S
        while (seen := self._seen(number)) not in _BACK:
            if time.monotonic() > deadline:
                raise RunError(f"node {number}: is {seen} {BACK_S:g} s after its self-test")
            self._wait(_POLL_S)

    def _seen(self, number: int) -> NodeStatus:
        with self.lead.write() as connection:
            cluster = clusters.row_of(connection, self.row["cluster_id"])
            return NodeStatus(clusters.node_of(connection, cluster, number)["status"])

    def _held(self, numbers: Sequence[int]) -> str | None:
        with self.lead.write() as connection:
            for job in clusters.active_jobs(connection, self.row["cluster_id"]):
                holds = JobStatus(job["status"]).holds_chips
                if holds and any(place[0] in numbers for place in job["placement"]):
                    return str(job["id"])
        return None

    def _updated(self, number: int) -> None:
        software = self._asked["software"]
        with self.lead.write() as connection:
            self._set(connection, number, software=software)
            words = {"software": software}
            cluster, operation = self.row["cluster_id"], self.row["id"]
            tell(
                connection,
                "software_updated",
                cluster=cluster,
                operation=operation,
                node=number,
                data=words,
            )

    def _resume(self, numbers: Sequence[int]) -> None:
        """But for those that a person had drained before."""
        with self.lead.write() as connection:
            for node in orders.node_rows(connection, self.row["cluster_id"]):
                number = node["number"]
                if number in numbers and node["drained"] and number not in self._asked["drained"]:
                    self._set(connection, number, drained=0)

    def _set(self, connection: Connection, number: int, **values: Any) -> None:
        where = (nodes.c.cluster_id == self.row["cluster_id"]) & (nodes.c.number == number)
        connection.execute(update(nodes).where(where).values(**values))

    def _wait(self, seconds: float) -> None:
        """In small parts, so that a service that leads no more does not wait for nothing."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.sleep(min(left, 1.0))
            with self.lead.write():
                pass


def over(connection: Connection, row: RowMapping, why: str) -> None:
    """The cluster is ready again, whether or not all nodes have the software."""
    values = {"status": ClusterStatus.READY, "message": why, "updated_s": time.time()}
    cluster = row["cluster_id"]
    connection.execute(update(cluster_table).where(cluster_table.c.id == cluster).values(**values))
    words = {"status": ClusterStatus.READY.value, "message": why}
    tell(connection, "cluster_status", cluster=cluster, data=words)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
