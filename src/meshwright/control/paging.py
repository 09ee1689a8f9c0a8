"""Lists in pages: a cursor is where the next page begins, and says nothing to anybody else."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from sqlalchemy import Connection, Select
from sqlalchemy.engine import RowMapping

from meshwright.base.errors import ConfigError


def page(
    connection: Connection, query: Select[Any], seq: Any, limit: int, cursor: str | None
) -> tuple[list[RowMapping], str | None]:
    """At most `limit` rows of `query` in the order of the column `seq`, and the cursor of the next
    page, None after the last. Raises ConfigError for a cursor that no list gave."""
    if cursor:
        query = query.where(seq > _position(cursor))
    found = connection.execute(query.order_by(seq).limit(limit + 1)).mappings().all()
    rows = list(found[:limit])
    more = len(found) > limit
    return rows, _cursor(rows[-1]["seq"]) if more else None


def _cursor(seq: int) -> str:
    return base64.urlsafe_b64encode(f"after:{seq}".encode()).decode().rstrip("=")


def _position(cursor: str) -> int:
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        word, _, number = text.decode().partition(":")
        position = int(number)
        if word != "after" or not 0 <= position < 1 << 63:
            raise ValueError(number)
    except (ValueError, binascii.Error) as error:
        raise ConfigError("cursor", cursor, "give one that the last page named, or none") from error
    return position
