"""What runs have told since they were last read, into the tables with where that reading ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, update
from sqlalchemy.engine import RowMapping

from meshwright.control import runs
from meshwright.control.service.events import STEP, tell
from meshwright.control.service.jobs import run_dir
from meshwright.control.store.tables import jobs


@dataclass(frozen=True)
class News:
    """Of one job: columns that are not as they were, and events of its run."""

    values: dict[str, Any]
    told: list[dict[str, Any]]


def read(home: Path, row: RowMapping) -> News | None:
    """What is new; None if nothing is."""
    run = run_dir(home, row["id"])
    file = runs.story_of(run)
    same = row["events_file"] in (None, file)
    told, offset = _all_new(run, row["events_read"] if same else 0)
    last = runs.last_metrics(run)
    values: dict[str, Any] = {}
    if offset != row["events_read"] or not same:
        values |= {"events_read": offset, "events_file": file}
    if last is not None and last.get("step") != row["step"]:
        values |= {"step": last["step"], "loss": last.get("loss")}
        values |= {"tokens_per_s": last.get("tokens_per_s")}
    return News(values, told) if values else None


def _all_new(run: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """To the end of the file, which is read by parts."""
    told, following = runs.new_events(run, offset)
    while following != offset:
        offset = following
        more, following = runs.new_events(run, offset)
        told += more
    return told, following


def write(connection: Connection, row: RowMapping, news: News) -> None:
    """Once, though two should have read the same."""
    where = (jobs.c.id == row["id"]) & (jobs.c.events_read == row["events_read"])
    if connection.execute(update(jobs).where(where).values(**news.values)).rowcount != 1:
        return
    for event in news.told:
        kind = f"run_{event['kind']}".replace("run_run_", "run_")
        tell(
            connection,
            kind,
            cluster=row["cluster_id"],
            job=row["id"],
            ts=event.get("ts"),
            data=event,
        )
    if "step" in news.values:
        words = {key: news.values[key] for key in ("step", "loss", "tokens_per_s")}
        tell(connection, STEP, cluster=row["cluster_id"], job=row["id"], data=words)
