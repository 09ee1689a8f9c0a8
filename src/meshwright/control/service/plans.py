"""Questions to the planner, kept with their answers."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.engine import RowMapping

from meshwright.base.errors import ConfigError, NotFoundError, did_you_mean
from meshwright.control.paging import page
from meshwright.control.service.events import new_id
from meshwright.control.spec import PlanRequest
from meshwright.control.store.tables import plans
from meshwright.control.views import PlanView, at
from meshwright.models import presets
from meshwright.plan.limits import refusal
from meshwright.plan.prediction import layout_of, predict
from meshwright.plan.search import search
from meshwright.plan.search_question import Wishes, ask


def answer(asked: PlanRequest) -> dict[str, Any]:
    """The best layouts. Takes up to a few seconds for the largest. Raises ConfigError."""
    if asked.model not in presets.names():  # no path: files of the service are not for all to read
        known = presets.names()
        hint = did_you_mean(asked.model, known) or f"; known: {', '.join(known)}"
        raise ConfigError("model", asked.model, f"there is no such preset{hint}")
    wishes = Wishes(asked.seq_len, asked.global_batch, asked.precision, asked.framework)
    question, _ = ask(asked.model, asked.cluster, wishes)
    found = search(question)
    if not len(found.best):
        raise refusal(question, found, lambda _: None).error(question)
    best = [
        predict(question, layout_of(question, found.best.candidates, index))
        for index in range(min(asked.top, len(found.best)))
    ]
    return {
        "cluster": question.cluster.name,
        "framework": question.framework.name,
        "seq_len": question.seq_len,
        "global_batch": question.global_batch,
        "legal_layouts": found.legal,
        "best": [one.document() for one in best],
        "notes": list(question.notes),
    }


def keep(connection: Connection, asked: PlanRequest, plan: dict[str, Any]) -> PlanView:
    """Write an answer down."""
    row = {"id": new_id("plan"), "question": asked.model_dump(mode="json"), "plan": plan}
    connection.execute(plans.insert().values(**row, created_s=time.time()))
    return describe(connection, str(row["id"]))


def describe(connection: Connection, plan: str) -> PlanView:
    """Raises NotFoundError."""
    found = connection.execute(select(plans).where(plans.c.id == plan)).mappings().first()
    if found is None:
        raise NotFoundError(f"plan {plan}: there is none; GET /v1/plans lists them")
    return _view(found)


def listed(
    connection: Connection, limit: int, cursor: str | None
) -> tuple[list[PlanView], str | None]:
    """A page of them."""
    rows, following = page(connection, select(plans), plans.c.seq, limit, cursor)
    return [_view(row) for row in rows], following


def _view(row: RowMapping) -> PlanView:
    return PlanView(
        id=row["id"], created_at=at(row["created_s"]), question=row["question"], plan=row["plan"]
    )
