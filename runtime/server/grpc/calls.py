"""Calls: handles the key, the line in the log and the error status of every call."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator

import grpc

from ..api.errors import ClientGone, HttpError
from ..api.gate import RequestGate
from ..engine.engine_stream import EngineStream
from ..log import RequestContext, current_request, with_fields
from .errors import as_call_error

log = logging.getLogger("icc.serve")
_POLLED = frozenset({"HealthCheck", "GetLoads"})  # come every few seconds: logged as DEBUG only


class Calls:
    """The calls of one server."""

    def __init__(self, gate: RequestGate) -> None:
        self._gate = gate
        self.last_received = 0.0  # in seconds since 1970

    @contextlib.asynccontextmanager
    async def call(
        self, context: grpc.aio.ServicerContext, name: str, *, request_id: str = "", queued: bool = False
    ) -> AsyncIterator[str]:
        """Context of a call; gives the name of the client. queued: whether the call waits for the engine; such calls
        are refused when the server shuts down or its queue is full. An error in the context ends the call with its
        status."""
        given = _Metadata(context)
        current_request.set(RequestContext(request_id or uuid.uuid4().hex, given.first("traceparent")))
        start, self.last_received = time.perf_counter(), time.time()
        status = "CANCELLED"
        try:
            client = self._gate.client(given.all("authorization"), given.all("x-api-key"))
            if queued:
                self._gate.check_running()
                self._gate.check_room()
            yield client
            status = "OK"
        except Exception as error:
            found = as_call_error(error)
            status = found.status.name
            if found.status is grpc.StatusCode.INTERNAL and not isinstance(error, HttpError):
                log.error("a call failed: %s", type(error).__name__, exc_info=error)
            await context.abort(found.status, found.message, found.metadata)
        finally:
            level = logging.DEBUG if name in _POLLED else logging.INFO
            request = current_request.get()
            if log.isEnabledFor(level) and request is not None:
                ms = round((time.perf_counter() - start) * 1e3, 1)
                fields = {"method": "GRPC", "path": name, "status": status, "ms": ms, "client": context.peer()}
                log.log(level, "request", extra=with_fields(**fields, **request.fields))


def seconds_left(context: grpc.aio.ServicerContext) -> float | None:
    """Seconds until the caller's deadline; None without a deadline. HttpError 504 if it has passed."""
    left = context.time_remaining()
    if left is not None and left <= 0:
        raise HttpError(504, "the deadline has passed", code="deadline")
    return left


class _Metadata:
    """The metadata of a call."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._pairs = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]

    def all(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key == name]

    def first(self, name: str) -> str:
        return next(iter(self.all(name)), "")


class RunningCall:
    """A request that can be aborted from another call, before it is sent to the engine or after."""

    def __init__(self) -> None:
        self._stream: EngineStream | None = None
        self._aborted = False

    def sent(self, stream: EngineStream) -> None:
        """Set the stream of a request that was sent to the engine; it ends at once if the request was aborted
        before."""
        self._stream = stream
        if self._aborted:
            stream.fail(ClientGone("the request was aborted"))

    def abort(self) -> None:
        """Abort the request: its stream raises ClientGone after the deltas so far."""
        self._aborted = True
        if self._stream is not None:
            self.sent(self._stream)


class RunningCalls:
    """The running requests, by client and request id."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], RunningCall] = {}

    @contextlib.contextmanager
    def named(self, client: str, request_id: str) -> Iterator[RunningCall]:
        """Context in which a request is registered. request_id: "" for a new one. HttpError 409 if a request of this id
        runs already."""
        key = client, request_id or uuid.uuid4().hex
        if key in self._running:
            raise HttpError(409, f"request_id: {request_id[:80]!r} runs already", "request_id", "conflict")
        running = self._running[key] = RunningCall()
        try:
            yield running
        finally:
            del self._running[key]

    def abort(self, client: str, request_ids: Iterable[str]) -> None:
        """Abort a client's requests with these ids; ids of no running request are ignored."""
        for request_id in request_ids:
            running = self._running.get((client, request_id))
            if running is not None:
                running.abort()
