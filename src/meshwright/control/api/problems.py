"""Errors as problem+json (RFC 9457): `title` is the line that the command line would print."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from meshwright.base.errors import (
    ConfigError,
    ConflictError,
    InputError,
    MeshwrightError,
    NotFoundError,
)
from meshwright.control.api.seams import ForbiddenError

_log = logging.getLogger(__name__)

MEDIA = "application/problem+json"


class Problem(BaseModel):
    """What went wrong, in one line, with the key and the value where there is one."""

    type: str = "about:blank"
    title: str
    status: int
    key: str | None = None
    value: Any = None


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answers of a route that are problems, for its OpenAPI."""
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {
        status: {"description": _MEANING[status], "content": {MEDIA: schema}}
        for status in (400, 403, 413, *statuses)
    }


_MEANING = {
    400: "What was asked cannot be done; the title names key, value and way out",
    403: "Whoever asks may not",
    404: "There is no such thing",
    409: "It does not go with how things are now",
    413: "The body is too large",
}


def install(app: FastAPI) -> None:
    """Have all errors of the application answered so."""
    app.add_exception_handler(MeshwrightError, _own)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(SQLAlchemyError, _database)


def answer(
    status: int,
    title: str,
    key: str | None = None,
    value: Any = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """One problem."""
    problem = Problem(title=title, status=status, key=key, value=_plain(value))
    return JSONResponse(problem.model_dump(mode="json"), status, headers, media_type=MEDIA)


def _own(_request: Request, error: Exception) -> JSONResponse:
    title = " ".join(str(error).split())
    if isinstance(error, ConfigError):
        return answer(400, title, error.key, error.value)
    return answer(_status(error), title)


def _status(error: Exception) -> int:
    for kind, status in (
        (ForbiddenError, 403),
        (NotFoundError, 404),
        (ConflictError, 409),
        (InputError, 400),
    ):
        if isinstance(error, kind):
            return status
    return 409  # as things are, it cannot be done


def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    key = ".".join(place[1:] or place)
    value = None if first["type"] == "missing" else first.get("input")
    return answer(400, f"{key}: {first['msg']}", key, value)


def _http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return answer(error.status_code, str(error.detail), headers=error.headers)


def _database(_request: Request, error: Exception) -> JSONResponse:
    _log.error("database: %s", error)
    return answer(503, "the database does not answer; nothing was done, try again")


def _plain(value: Any) -> Any:
    """A value as it may stand in an answer: short, and plain JSON."""
    if value is None or isinstance(value, bool | int | float):
        return (
            value if value == value and value not in (float("inf"), float("-inf")) else str(value)
        )
    text = value if isinstance(value, str) else repr(value)
    return text[:200].encode("utf-8", "replace").decode()
