"""Names on the wire that follow from ours, so that none has to be kept."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TypeVar

from meshwright.control.hyperpod.errors import ValidationExceptionError

Row = TypeVar("Row")
Place = tuple[str | float, int]  # what a list is sorted by, then a number that is its own

_ARN = "arn:aws:sagemaker:local:000000000000:cluster/"
_EVENT = "4000-8000"


def arn(cluster: str) -> str:
    """Of a cluster by its id, `clu-` and twelve hexadecimal digits."""
    return _ARN + cluster.removeprefix("clu-")


def cluster_id(ref: str) -> str | None:
    """The id that an ARN means; None for a name, or an ARN of somebody else's."""
    return "clu-" + ref.removeprefix(_ARN) if ref.startswith(_ARN) else None


def instance_id(cluster: str, node: int, replaced_s: float | None) -> str:
    """Of the machine that is this node now: another one once it is replaced."""
    return "i-" + sha256(f"{cluster}/{node}/{replaced_s or 0}".encode()).hexdigest()[:17]


def logical_id(cluster_name: str, node: int) -> str:
    """Of the node, whatever machine it is."""
    return f"{cluster_name}-{node}"


def event_id(cluster: str, seq: int) -> str:
    """Of an event by its number."""
    digits = cluster.removeprefix("clu-")
    return f"{digits[:8]}-{digits[8:12]}-{_EVENT}-{seq:012x}"


def event_seq(cluster: str, event: str) -> int | None:
    """The number of an event of that cluster; None if the id is none of its."""
    seq = int(event[-12:], 16)
    return seq if event == event_id(cluster, seq) else None


def page(
    rows: Sequence[Row],
    place: Callable[[Row], Place],
    descending: bool,
    limit: int,
    token: str | None,
) -> tuple[list[Row], str | None]:
    """At most `limit` rows by their places, and the token of the next page."""
    ordered = sorted(rows, key=place, reverse=descending)
    if token:
        last = place_of(token)
        try:
            ordered = [r for r in ordered if (place(r) < last if descending else place(r) > last)]
        except TypeError as error:  # a page of a list that was sorted by something else
            raise _bad_token(token) from error
    more = len(ordered) > limit
    return ordered[:limit], token_of(place(ordered[limit - 1])) if more else None


def token_of(place: Place) -> str:
    """Where the next page begins; says nothing to clients."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


def place_of(token: str) -> Place:
    """Raises ValidationExceptionError for a token that no list gave."""
    try:
        if not re.fullmatch(r"[A-Za-z0-9_=-]+", token):
            raise ValueError(token)
        key, number = json.loads(base64.urlsafe_b64decode(token))
        number_fits = type(number) is int and 0 <= number < 1 << 62
        if isinstance(key, bool) or not isinstance(key, str | int | float) or not number_fits:
            raise ValueError(token)
    except (ValueError, TypeError, RecursionError, binascii.Error) as error:
        raise _bad_token(token) from error
    return key, number


def _bad_token(token: str) -> ValidationExceptionError:
    return ValidationExceptionError(
        f"NextToken {token[:40]!r}: give the one that the last page of this list named, or none"
    )
