"""SageMaker's JSON protocol (`POST /`, the operation in a header) over the same service."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute

from meshwright.control.api.seams import Served
from meshwright.control.host import Host
from meshwright.control.hyperpod import clusters, events, nodes
from meshwright.control.hyperpod.errors import SerializationError, UnknownOperationError, as_aws

MEDIA = "application/x-amz-json-1.1"
_TARGET = "SageMaker."
_log = logging.getLogger(__name__)

Operation = Callable[[Host, Any], dict[str, Any]]


class AwsRoute(APIRoute):
    """A route whose errors, those of its dependencies too, are answered as AWS answers them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As in FastAPI."""
        inner = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await inner(request)
            except Exception as error:
                status, code, message = as_aws(error)
                if status >= 500:
                    _log.error("%s", error, exc_info=error)
                return _answer(status, {"__type": code, "message": message}, code)

        return handler


router = APIRouter(route_class=AwsRoute)


# Signatures (SigV4) are taken and not looked at: whoever is on this machine may do everything, as
# by the REST API, and `authorise` lets both through. Users and keys come with that one place.
@router.post("/", operation_id="SageMaker", include_in_schema=False)
async def sagemaker(request: Request, host: Served) -> Response:
    """One operation."""
    body = await request.body()
    headers = request.headers
    answer = await run_in_threadpool(_do, host, headers, body)
    return _answer(200, answer)


def _do(host: Host, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    known = operations()
    target = headers.get("x-amz-target", "")
    operation = known.get(target.removeprefix(_TARGET)) if target.startswith(_TARGET) else None
    if operation is None:
        raise UnknownOperationError(
            f"X-Amz-Target {target[:100]!r}: not answered here; there are {', '.join(known)}"
        )
    if headers.get("content-type", "").partition(";")[0].strip() != MEDIA:
        raise SerializationError(f"Content-Type: give {MEDIA}")
    return operation(host, _parsed(body))


def operations() -> dict[str, Operation]:
    """What is answered, by name."""
    return {**clusters.operations(), **nodes.operations(), **events.operations()}


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body or b"{}", parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise SerializationError(f"the body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise SerializationError("the body is not a JSON object")
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _answer(status: int, body: Mapping[str, Any], code: str = "") -> Response:
    headers = {"x-amzn-requestid": str(uuid4())}
    if code:
        headers["x-amzn-errortype"] = code
    return Response(json.dumps(body), status, headers, media_type=MEDIA)
