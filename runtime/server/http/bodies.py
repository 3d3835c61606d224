"""Reads bodies of requests within limits, and makes answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from ..api import limits
from ..api.anthropic.answer import error_body
from ..api.decoding import decoded
from ..api.errors import ClientGone, HttpError
from ..api.ollama.answer import OllamaErrorBody
from ..log import current_request

T = TypeVar("T")
_encoder = msgspec.json.Encoder()
_DISCARD_BYTES, _DISCARD_S = 16 << 20, 2.0


def json_response(
    value: msgspec.Struct | Sequence[msgspec.Struct], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response whose body is a struct, or several, as JSON."""
    return Response(_encoder.encode(value), status, headers, media_type="application/json")


def error_response(scope: Scope, error: HttpError, headers: dict[str, str] | None = None) -> Response:
    """An error in the form of the API that the path belongs to. headers: added to the error's own, None for none."""
    request = current_request.get()
    body: msgspec.Struct = error.body()
    if scope["path"].startswith("/v1/messages"):
        body = error_body(error, request.id if request is not None else None)
    elif scope["path"].startswith("/api/"):
        body = OllamaErrorBody(error.message, error.code, error.param)
    return json_response(body, error.status, {**error.headers(), **(headers or {})})


async def read_body(request: Request) -> bytes:
    """The body of a request, within its limits of size and time, or HttpError 413 or 408. ClientGone if the client
    disconnects before it was sent.

    Part of a body that is too large is read and discarded: a client that is still sending would not see the answer.
    """
    discarded = 0
    too_large = HttpError(413, f"the body is larger than {limits.BODY_BYTES} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "0")
    body, size = bytearray(), int(declared) if declared.isdigit() else 0
    try:
        async with asyncio.timeout(limits.BODY_S if size <= limits.BODY_BYTES else _DISCARD_S):
            async for part in request.stream():
                size = max(size, len(body) + len(part))
                if size <= limits.BODY_BYTES:
                    body += part
                elif (discarded := discarded + len(part)) > _DISCARD_BYTES:
                    break
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        if size > limits.BODY_BYTES:
            raise too_large from None
        raise HttpError(408, f"the body took longer than {limits.BODY_S:g} s", code="body_timeout") from None
    if size > limits.BODY_BYTES:
        raise too_large
    return bytes(body)


async def decode_body(request: Request, kind: type[T]) -> T:
    """The decoded body. HttpError 400 tells which field does not match the schema of `kind`, and why."""
    return decoded(await read_body(request), kind)
