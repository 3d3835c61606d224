"""Errors as gRPC statuses."""

from __future__ import annotations

from typing import NamedTuple

from grpc import StatusCode

from ..api.errors import as_http

# the gRPC status for an HTTP status
STATUS = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    408: StatusCode.DEADLINE_EXCEEDED,
    409: StatusCode.ALREADY_EXISTS,
    413: StatusCode.RESOURCE_EXHAUSTED,
    429: StatusCode.RESOURCE_EXHAUSTED,
    499: StatusCode.CANCELLED,
    500: StatusCode.INTERNAL,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
# values of HttpError.code that have a more exact status
CODES = {"unsupported": StatusCode.UNIMPLEMENTED}
PUSHBACK = "grpc-retry-pushback-ms"  # gRFC A6: milliseconds until clients may retry, negative for never


class CallError(NamedTuple):
    """The end of a failed call. metadata: the trailing metadata, with the code and the field of the error."""

    status: StatusCode
    message: str
    metadata: tuple[tuple[str, str], ...]


def as_call_error(error: Exception) -> CallError:
    """The end of a call that failed with this error."""
    found = as_http(error)
    status = CODES.get(found.code or "") or STATUS.get(found.status, StatusCode.INTERNAL)
    metadata = {"icc-code": found.code, "icc-field": found.param}
    if found.retry_after is not None:
        metadata[PUSHBACK] = str(found.retry_after * 1000)
    elif found.code == "too_expensive":  # a retry would fail too
        metadata[PUSHBACK] = "-1"
    return CallError(status, found.message, tuple((name, value) for name, value in metadata.items() if value))
