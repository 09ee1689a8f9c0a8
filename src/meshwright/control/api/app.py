"""The application: routes, errors, limits."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import Depends, FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.control.api import clusters, jobs, page, problems, rest
from meshwright.control.api.seams import authorise
from meshwright.control.host import Host
from meshwright.control.hyperpod import router as hyperpod

MOST_BYTES = 4 << 20  # of a request's body


def create_app(host: Host, names: Iterable[str] = ()) -> FastAPI:
    """The application over an entered host. `names`: of this service besides localhost."""
    app = FastAPI(
        title="Meshwright",
        version="1",
        description="Clusters, jobs and what becomes of them.",
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(authorise)],
        separate_input_output_schemas=False,
    )
    app.state.host, app.state.names = host, tuple(names)
    app.state.ending = threading.Event()
    problems.install(app)
    for part in (clusters, jobs, rest, hyperpod):
        app.include_router(part.router)
    app.include_router(page.router)
    app.add_middleware(Limited)
    _describe_problems(app)
    return app


def _describe_problems(app: FastAPI) -> None:
    """In OpenAPI: what problems are, and no other shape of error than that."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        found = plain()
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        schemas.setdefault("Problem", problems.Problem.model_json_schema())
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return found

    app.openapi = openapi  # type: ignore[method-assign]


class Limited:
    """Refuses bodies that are too large, before they are read or while they come."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MOST_BYTES:
            refusal = problems.answer(413, f"the body is larger than {MOST_BYTES} bytes")
            await refusal(scope, receive, send)
            return
        await self._app(scope, _counted(receive), send)


def _counted(receive: Receive) -> Callable[[], Awaitable[Message]]:
    taken = 0

    async def counted() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MOST_BYTES:
            return {"type": "http.disconnect"}
        return message

    return counted
