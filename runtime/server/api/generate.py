"""Running a job: the engine's stream becomes an HTTP answer, whole or in events, while the client is there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine.admission import Admission
from ..engine.engine_client import EngineClient, Stream
from ..engine.messages import Delta
from ..http import limits
from ..http.errors import HttpError, as_http
from ..http.metrics import Metrics
from .answers import Answer
from .jobs import Job
from .requests import decode

log = logging.getLogger("icc.serve")
T = TypeVar("T")
_encoder = msgspec.json.Encoder()
_GRACE_S = 1.0  # that the engine has to end what is past its deadline
_DISCARD_BYTES, _DISCARD_S = 16 << 20, 2.0
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Generator:
    """Runs jobs: admission before anything else, then the engine; whatever happens, what was taken is given back."""

    def __init__(self, engine: EngineClient, admission: Admission, metrics: Metrics) -> None:
        self.engine, self.admission, self.metrics = engine, admission, metrics

    @contextlib.contextmanager
    def started(self, job: Job) -> Iterator[Run]:
        """The job, admitted and sent; what is left of it is cancelled at the end."""
        with self.admission.admitted(job.price, job.submits[0].priority):
            stream = self.engine.submit(job.submits)
            run = Run(job, stream)
            try:
                yield run
            except (asyncio.CancelledError, ClientDisconnect):
                run.reason = "abort"
                raise
            except BaseException:
                run.reason = "error"
                raise
            finally:
                self.engine.close(stream)
                self.metrics.request_ended(run)
                if run.reason is None and run.first is not None and "deadline" not in run.reasons:
                    self.admission.served(run.last - run.started - run.queued_s)


class Run:
    """A job under way: its deltas, with the times at which they came."""

    def __init__(self, job: Job, stream: Stream) -> None:
        self.job, self.stream = job, stream
        self.started = time.monotonic()
        self.first: float | None = None
        self.last = self.started
        self.gaps: list[tuple[float, int]] = []  # seconds from one delta to the next, and how many tokens came
        self.queued_s = 0.0
        self.output_tokens = 0
        self.reasons: list[str] = []
        self._open = {(place, index) for place in stream.ids for index in range(job.submits[0].params.n)}
        self.reason: str | None = None

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """The deltas as they come, until every completion has ended. The engine ends those that are past the deadline;
        they end here if it does not, because it hangs."""
        now = asyncio.get_running_loop().time()
        end = None if self.job.deadline is None else now + self.job.deadline + _GRACE_S
        while self._open:
            try:
                async with asyncio.timeout_at(end):
                    deltas = await self.stream.take()
            except TimeoutError:
                deltas = [Delta(*place, reason="deadline") for place in sorted(self._open)]
            self._note(deltas)
            yield deltas

    def _note(self, deltas: list[Delta]) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = now
            self.queued_s = deltas[0].queued_s
        else:
            self.gaps.append((now - self.last, len(deltas)))
        self.last = now
        self.output_tokens += sum(len(delta.token_ids) for delta in deltas)
        ended = [delta for delta in deltas if delta.reason is not None]
        self.reasons += [delta.reason or "" for delta in ended]
        self._open -= {(delta.id, delta.index) for delta in ended}


async def whole_answer(generator: Generator, job: Job, make: Callable[[Stream], Answer]) -> msgspec.Struct:
    """The answer in one piece."""
    with generator.started(job) as run:
        answer = make(run.stream)
        deltas: list[Delta] = []
        async for some in run.deltas():
            deltas += some
        return answer.whole(deltas)


class EventStream(Response):
    """Server-sent events, written as the deltas come. What fails before the first delta is an ordinary error."""

    def __init__(self, generator: Generator, job: Job, make: Callable[[Stream], Answer], include_usage: bool) -> None:
        self._generator, self._job, self._make, self._include_usage = generator, job, make, include_usage
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = _Sender(send, scope.get("icc.abort"))
        try:
            await while_connected(receive, self._events(sender))
        except ClientDisconnect:
            pass
        except Exception as error:
            found = as_http(error)
            if found.status == 500 and not isinstance(error, HttpError):
                log.warning("a stream failed: %s", type(error).__name__)
            if sender.begun:
                await sender.end(_event(found.body()))
            else:
                await json_response(found.body(), found.status, found.headers())(scope, receive, send)

    async def _events(self, sender: _Sender) -> None:
        with self._generator.started(self._job) as run:
            answer = self._make(run.stream)
            opening = answer.begin()
            async for deltas in run.deltas():
                chunks = answer.chunks(deltas)
                await sender.send(b"".join([_event(chunk) for chunk in [*opening, *chunks]]))
                opening = []
            last = _event(answer.usage_chunk()) if self._include_usage else b""
        await sender.end(last)


class _Sender:
    """Writes events. A client that reads too slowly is cut off, so that it holds nothing."""

    def __init__(self, send: Send, abort: Callable[[], None] | None) -> None:
        self._send, self._abort = send, abort
        self.begun = False

    async def send(self, body: bytes, last: bool = False) -> None:
        try:
            async with asyncio.timeout(limits.WRITE_S):
                if not self.begun:
                    self.begun = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                await self._send({"type": "http.response.body", "body": body, "more_body": not last})
        except TimeoutError:
            if self._abort is not None:
                self._abort()
            raise ClientDisconnect from None

    async def end(self, body: bytes) -> None:
        """The last event and the mark of the end."""
        await self.send(body + b"data: [DONE]\n\n", last=True)


def _event(value: msgspec.Struct) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


def json_response(value: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encoder.encode(value), status, headers, media_type="application/json")


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work unless the client goes. ClientDisconnect if it did; the work is cancelled then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        await task
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request) -> bytes:
    """The body of a request, within its limits of size and time.

    Some of what is too much is read and thrown away: a client that is still sending would not see the answer.
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
    except TimeoutError:
        if size > limits.BODY_BYTES:
            raise too_large from None
        raise HttpError(408, f"the body took longer than {limits.BODY_S:g} s", code="body_timeout") from None
    if size > limits.BODY_BYTES:
        raise too_large
    return bytes(body)


async def decode_body(request: Request, kind: type[T]) -> T:
    """The decoded body. HttpError 400, which field and why, if it is not what the schema says."""
    return decoded(await read_body(request), kind)


def decoded(raw: bytes, kind: type[T]) -> T:
    """A body as what its schema says, or HttpError 400: which field and why."""
    try:
        return decode(raw, kind)
    except RecursionError as error:
        raise HttpError(400, "the body is nested too deep", code="invalid_json") from error
    except UnicodeDecodeError as error:
        raise HttpError(400, "the body is not UTF-8", code="invalid_json") from error
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `")
        field = place.removeprefix("$.").rstrip("`")
        unknown = re.search(r"unknown field `(.+)`", text)
        named = ".".join(filter(None, [field, unknown[1] if unknown else ""])) or None
        raise HttpError(400, f"{field}: {text}" if field else text, named, "invalid_value") from error
    except msgspec.DecodeError as error:
        raise HttpError(400, f"the body is not JSON: {error}", code="invalid_json") from error
