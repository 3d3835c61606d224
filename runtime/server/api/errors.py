"""Errors of requests as HTTP answers."""

from __future__ import annotations

from ...errors import BusyError, CapacityError, IccError, RequestError
from ..engine.admission import Overloaded, TooExpensive
from ..engine.engine_stream import EngineFailed
from .responses import Error, ErrorBody

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "overloaded_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class ClientGone(Exception):
    """The client has disconnected."""


class HttpError(IccError):
    """An answer other than 200. `code` is a fixed word, `param` the field of the request."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> ErrorBody:
        """The JSON body, in OpenAI's form."""
        return ErrorBody(Error(self.message, _TYPES.get(self.status, "server_error"), self.param, self.code))

    def headers(self) -> dict[str, str]:
        """Headers of the answer: when to try again, and whether the connection ends."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.code == "too_expensive":  # a retry would fail too; OpenAI's clients read this header
            headers["x-should-retry"] = "false"
        if self.status in (408, 413):  # the rest of the body is not waited for
            headers["connection"] = "close"
        return headers


def conflict(message: str, field: str) -> HttpError:
    """The answer for fields that are valid by themselves and contradict each other."""
    return HttpError(400, message, field, "conflicting_fields")


def context_overflow(longest: int, tokens: int, field: str) -> HttpError:
    """The answer for a prompt that is too long, in the words that clients search for to choose another model. longest,
    tokens: the engine's limit and the prompt's length in tokens."""
    return HttpError(
        400,
        f"This model's maximum context length is {longest} tokens. However, your {field} resulted in {tokens} tokens"
        f"{', which leaves no room for an answer' if tokens == longest else ''}. "
        f"Please reduce the length of the {field}.",
        field,
        "context_length_exceeded",
    )


def as_http(error: Exception) -> HttpError:
    """The answer for an error; an unexpected error reveals no internals."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, ClientGone):  # for the log and the metrics; 499 is nginx's number for it
        return HttpError(499, "the client has gone", code="client_gone")
    if isinstance(error, Overloaded):
        return HttpError(429, error.message, code="queue_full", retry_after=error.retry_after)
    if isinstance(error, TooExpensive):
        return HttpError(429, error.message, code="too_expensive")
    if isinstance(error, EngineFailed):
        again = error.status == 503
        code = "engine_unavailable" if again else None
        return HttpError(error.status, error.message, error.field or None, code, retry_after=1 if again else None)
    if isinstance(error, BusyError):
        return HttpError(503, error.message, code="busy", retry_after=5)
    if isinstance(error, RequestError | CapacityError):
        return HttpError(400, error.message, getattr(error, "field", None) or None, code="unprocessable")
    return HttpError(500, "the server failed on this request")
