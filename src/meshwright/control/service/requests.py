"""Writes that are asked for twice with one key are done once, and answered alike."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from sqlalchemy import Connection, delete, select

from meshwright.base.errors import ConflictError
from meshwright.control.store.tables import requests

KEPT_S = 7 * 86_400.0


@dataclass(frozen=True)
class Answer:
    """What a write was answered."""

    status: int
    body: Any


def digest(what: str, body: Mapping[str, Any]) -> str:
    """Of a request: which route, and what was asked."""
    return sha256(f"{what}\n{json.dumps(body, sort_keys=True)}".encode()).hexdigest()


def earlier(connection: Connection, key: str, asked: str) -> Answer | None:
    """The answer that a request of that key has had. Raises ConflictError if it asked for something
    else."""
    query = select(requests).where(requests.c.key == key)
    found = connection.execute(query).mappings().first()
    if found is None:
        return None
    if found["digest"] != asked:
        raise ConflictError(
            f"Idempotency-Key {key}: was used for another request; take a new key for this one"
        )
    return Answer(found["status"], found["answer"])


def remember(connection: Connection, key: str, asked: str, answer: Answer) -> None:
    """Keep an answer, in the transaction of what it tells of."""
    row = {"key": key, "digest": asked, "status": answer.status, "answer": answer.body}
    connection.execute(requests.insert().values(**row, ts=time.time()))


def forget_old(connection: Connection, now_s: float) -> None:
    """Drop answers that nobody will ask for again."""
    connection.execute(delete(requests).where(requests.c.ts < now_s - KEPT_S))
