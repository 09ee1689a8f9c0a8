"""What all routes share: the host behind them, who asks, and how writes are answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, Header, Path, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from sqlalchemy import Connection

from meshwright.base.errors import MeshwrightError
from meshwright.control.host import Host

_LOCAL = ("localhost", "127.0.0.1", "::1")


class ForbiddenError(MeshwrightError):
    """Whoever asks may not."""


# Dependencies are `async` though they wait for nothing: others are called on a thread of their own.


@dataclass(frozen=True)
class Caller:
    """Who asks."""

    name: str


async def authorise(request: Request) -> Caller:
    """The one place where a request is let through, by its route's operation id and its caller.

    The service listens on loopback, and whoever is on the machine may do everything: but a page in
    a browser there may not, under whatever name it reaches us. Raises ForbiddenError.
    """
    host = request.url.hostname or ""
    if host not in (*_LOCAL, *request.app.state.names):
        raise ForbiddenError(f"Host {host!r}: this service is not known by that name")
    origin = request.headers.get("origin")
    if origin and origin != "null" and urlsplit(origin).netloc == request.url.netloc:
        return Caller("local")
    if origin:
        raise ForbiddenError(f"Origin {origin!r}: other sites may not use this service")
    return Caller("local")


async def _host(request: Request) -> Host:
    found: Host = request.app.state.host
    return found


Served = Annotated[Host, Depends(_host)]
Id = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9-]+$")]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="a write that is sent again with it is done once",
    ),
]
Limit = Annotated[int, Query(ge=1, le=500)]
Cursor = Annotated[
    str | None, Query(max_length=64, description="of the last page, for the next one")
]


def told(document: BaseModel) -> Response:
    """The answer to a read, made on the thread that has read it: large ones would keep the loop
    that serves all connections."""
    return Response(document.model_dump_json(), media_type="application/json")


def done(
    host: Host,
    what: str,
    key: str | None,
    asked: Mapping[str, Any],
    status: int,
    act: Callable[[Connection], BaseModel],
) -> JSONResponse:
    """The answer to a write that is on the disk."""
    answer = host.write(what, key, asked, status, act)
    return JSONResponse(answer.body, answer.status)
