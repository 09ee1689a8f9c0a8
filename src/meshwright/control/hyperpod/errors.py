"""Errors as SageMaker's clients know them."""

from __future__ import annotations

from sqlalchemy.exc import SQLAlchemyError

from meshwright.base.errors import (
    ConfigError,
    ConflictError,
    InputError,
    MeshwrightError,
    NotFoundError,
)
from meshwright.control.api.seams import ForbiddenError


class AwsError(InputError):
    """One of theirs; `code` is its name on the wire."""

    code = "ValidationException"
    status = 400


class ValidationExceptionError(AwsError):
    """What was asked for cannot be."""


class ResourceInUseError(AwsError):
    """The name is taken."""

    code = "ResourceInUse"


class UnknownOperationError(AwsError):
    """No operation of that name is answered."""

    code = "UnknownOperationException"


class SerializationError(AwsError):
    """The body is no JSON object."""

    code = "SerializationException"


def as_aws(error: Exception) -> tuple[int, str, str]:
    """Status, code and message of an error; the status is what botocore's model has for it."""
    line = " ".join(str(error).split())
    if isinstance(error, AwsError):
        return error.status, error.code, line
    if isinstance(error, ConfigError):
        limit = error.key == "nodes"  # more of them than the engine can have
        return 400, "ResourceLimitExceeded" if limit else "ValidationException", line
    if isinstance(error, SQLAlchemyError):
        return 503, "ServiceUnavailable", "the database does not answer; nothing was done"
    if not isinstance(error, MeshwrightError):
        return 500, "InternalFailure", "a fault of the service; its log has more"
    for kind, status, code in (
        (ForbiddenError, 403, "AccessDeniedException"),
        (NotFoundError, 400, "ResourceNotFound"),
        (ConflictError, 400, "ConflictException"),
        (InputError, 400, "ValidationException"),
    ):
        if isinstance(error, kind):
            return status, code, line
    return 400, "ConflictException", line
