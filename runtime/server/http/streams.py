"""Answers as server-sent events, cancelled if the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..api import limits
from ..api.errors import ClientGone, HttpError, as_http
from ..api.generate import AnswerWriter, Generator
from ..api.jobs import Job
from ..engine.engine_stream import EngineStream
from .bodies import error_response

log = logging.getLogger("icc.serve")
_encoder = msgspec.json.Encoder()
_AT_ONCE = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


@dataclass(frozen=True)
class Framing:
    """How events are written. named: whether an event has a name, its field `type`. mark: the bytes that end the
    stream. media: its content type."""

    named: bool = False
    mark: bytes = b"data: [DONE]\n\n"
    media: bytes = b"text/event-stream; charset=utf-8"

    def event(self, value: msgspec.Struct) -> bytes:
        """A struct as a server-sent event."""
        name = f"event: {getattr(value, 'type')}\n".encode() if self.named else b""  # noqa: B009  not every struct
        return name + b"data: " + _encoder.encode(value) + b"\n\n"

    def events(self, values: Sequence[msgspec.Struct]) -> bytes:
        """Structs as server-sent events, one after the other."""
        return b"".join(map(self.event, values))


class LineFraming(Framing):
    """One JSON value a line, without server-sent events."""

    def event(self, value: msgspec.Struct) -> bytes:
        return _encoder.encode(value) + b"\n"


CHUNKS = Framing()
NAMED = Framing(named=True)
LINES = LineFraming(mark=b"", media=b"application/x-ndjson")


class EventStream(Response):
    """Server-sent events, written as the deltas come. A failure before the first delta gives an ordinary error
    answer."""

    def __init__(
        self, generator: Generator, job: Job, make: Callable[[EngineStream], AnswerWriter], framing: Framing = CHUNKS
    ) -> None:
        self._generator, self._job, self._make, self._framing = generator, job, make, framing
        self._answer: AnswerWriter | None = None
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = _Sender(send, scope.get("icc.abort"), self._framing.media)
        try:
            await while_connected(receive, self._events(sender))
        except Exception as error:
            if isinstance(error, ClientGone) and sender.begun:
                return
            found = as_http(error)
            if found.status == 500 and not isinstance(error, HttpError):
                log.warning("a stream failed: %s", type(error).__name__)
            if sender.begun and self._answer is not None:
                await sender.send(self._framing.events(self._answer.failed(found)) + self._framing.mark, last=True)
            else:
                await error_response(scope, found)(scope, receive, send)

    async def _events(self, sender: _Sender) -> None:
        with self._generator.started(self._job) as run:
            self._answer = answer = self._make(run.stream)
            opening = self._framing.events(answer.begin())
            async for deltas in run.deltas():
                await sender.send(opening + self._framing.events(answer.chunks(deltas)))
                opening = b""
            last = self._framing.events(answer.end())
        await sender.send(last + self._framing.mark, last=True)


class _Sender:
    """Writes events. A client that reads too slowly is disconnected, so that it holds no resources."""

    def __init__(self, send: Send, abort: Callable[[], None] | None, media: bytes) -> None:
        self._send, self._abort = send, abort
        self._headers = [(b"content-type", media), *_AT_ONCE]
        self.begun = False

    async def send(self, body: bytes, last: bool = False) -> None:
        try:
            async with asyncio.timeout(limits.WRITE_S):
                if not self.begun:
                    self.begun = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                await self._send({"type": "http.response.body", "body": body, "more_body": not last})
        except TimeoutError:
            if self._abort is not None:
                self._abort()
            raise ClientGone from None


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Await the work; if the client disconnects, cancel it and raise ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        await task
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
