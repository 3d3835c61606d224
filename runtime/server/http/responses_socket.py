"""/v1/responses over a WebSocket: every message of the client asks for one response, whose events are messages.

The responses of a connection are kept while it is open, so that later requests can continue one that is not stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from ..api import limits
from ..api.decoding import decoded
from ..api.errors import HttpError, as_http
from ..api.openresponses.answer import ResponsesAnswer
from ..api.openresponses.request import ResponsesRequest
from ..api.openresponses.store import ResponseStore
from .parts import ServerParts

log = logging.getLogger("icc.serve")
_encoder = msgspec.json.Encoder()
_OF_HTTP = ("stream", "stream_options", "background")  # fields that have a meaning only over HTTP
_WAITING = 16  # messages that are read in advance


class ResponsesSocket:
    """One connection: its requests are answered one after the other."""

    def __init__(self, parts: ServerParts, websocket: WebSocket) -> None:
        self._parts, self._socket = parts, websocket
        self._client: str = websocket.scope["icc.client"]
        self._kept = ResponseStore(limits.SOCKET_STORED_BYTES)
        self._messages: asyncio.Queue[str | bytes] = asyncio.Queue(_WAITING)

    async def serve(self) -> None:
        """Answer requests until the client disconnects, or SOCKET_S have passed."""
        await self._socket.accept()
        reading = asyncio.create_task(self._read())
        answering = asyncio.create_task(self._answer_all())
        try:
            await asyncio.wait([reading, answering], timeout=limits.SOCKET_S, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() and not answering.done():
                error = HttpError(400, "the connection has reached its limit of time: open another one")
                error.code = "websocket_connection_limit_reached"
                await self._fail(error)
        finally:
            for task in (reading, answering):
                task.cancel()
            await asyncio.gather(reading, answering, return_exceptions=True)
            if self._socket.application_state is WebSocketState.CONNECTED:
                with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                    await self._socket.close()

    async def _read(self) -> None:
        """Read messages until the client disconnects; a running request is cancelled then."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            await self._messages.put(message.get("text") or message.get("bytes") or "")

    async def _answer_all(self) -> None:
        while True:
            raw = await self._messages.get()
            previous: str | None = None
            try:
                fields = _fields(raw)
                previous = fields.get("previous_response_id")
                request = decoded(_encoder.encode(fields), ResponsesRequest)
                await self._answer(request)
            except WebSocketDisconnect:
                return
            except Exception as error:
                if not isinstance(error, HttpError) and as_http(error).status == 500:
                    log.error("a request failed: %s", type(error).__name__, exc_info=error)
                self._forget(previous)
                await self._fail(as_http(error))

    async def _answer(self, request: ResponsesRequest) -> None:
        parts = self._parts
        request = parts.jobs.named(request)
        parts.generator.admission.check_room()
        job, make = await parts.conversations.begin(request, self._client, self._kept)
        answer: ResponsesAnswer | None = None
        try:
            with parts.generator.started(job) as run:
                answer = make(run.stream)
                await self._send(*answer.begin())
                async for deltas in run.deltas():
                    await self._send(*answer.chunks(deltas))
                last = answer.end()
            await self._send(*last)
        except WebSocketDisconnect:
            raise
        except Exception as error:
            if answer is None:
                raise
            self._forget(request.previous_response_id)
            await self._send(*answer.failed(as_http(error)))

    def _forget(self, response_id: Any) -> None:
        """Drop the response that a failed request continued, if only this connection has it."""
        if isinstance(response_id, str) and self._kept.holds(self._client, response_id):
            self._kept.delete(self._client, response_id)

    async def _send(self, *events: msgspec.Struct) -> None:
        async with asyncio.timeout(limits.WRITE_S):
            for event in events:
                await self._socket.send_text(_encoder.encode(event).decode())

    async def _fail(self, error: HttpError) -> None:
        body = msgspec.to_builtins(error.body())["error"]
        body["code"] = body.get("code") or body["type"]
        await self._socket.send_text(_encoder.encode({"type": "error", "status": error.status, "error": body}).decode())


def _fields(raw: str | bytes) -> dict[str, Any]:
    """The fields of the request in a message. HttpError 400 if it is not a valid message."""
    try:
        message = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise HttpError(400, f"the message is not JSON: {error}", code="invalid_json") from error
    if not isinstance(message, dict) or message.pop("type", None) != "response.create":
        raise HttpError(400, 'type: a message must be {"type": "response.create", ...}', "type", "invalid_value")
    given = next((name for name in _OF_HTTP if message.get(name) is not None), None)
    if given is not None:
        raise HttpError(400, f"{given}: responses are always streamed here", given, "invalid_value")
    return message
