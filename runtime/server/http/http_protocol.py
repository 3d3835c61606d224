"""HttpProtocol: uvicorn's protocol, with limits on the request line and headers."""

from __future__ import annotations

import asyncio
import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..api import limits

_WATCH_S, _SILENT = 0.1, 5  # interval of checks of a half-closed connection, and after how many of them it is probed
_TCP_CLOSED = 7  # a state in the kernel's tcp_info


class _UnknownLength(int):
    """The length of a body that ends with its connection, in a form that never runs out in uvicorn's count."""

    def __lt__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _UnknownLength:
        return self


class HttpProtocol(HttpToolsProtocol):
    """Bounds the time, number and size of a request's line and headers, which uvicorn does not. A client that has
    closed its side of the connection still gets its answer. Bodies of HTTP/1.0 end with the connection.

    Sets `icc.abort` in the ASGI scope, which drops the connection and all unsent data.
    """

    _timer: asyncio.TimerHandle | None = None
    _watched = 0  # checks of a half-closed connection so far
    _seen = 0  # bytes of the current request line and headers
    _reading_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._reading_headers:
            if self._timer is None:
                self._start_timer()  # the first bytes of the next request
            self._seen += len(data)
        super().data_received(data)
        if self._reading_headers and self._seen > limits.HEADER_BYTES:
            self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["icc.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._reading_headers = False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.headers) > limits.HEADERS or size > limits.HEADER_BYTES:
            self._refuse()
        else:
            super().on_headers_complete()
            if self.cycle is not None and self.scope["http_version"] == "1.0":  # has no chunks (RFC 9112, 6.1)
                self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _UnknownLength()

    def on_message_complete(self) -> None:
        self._reading_headers, self._seen = True, 0
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    # -- half-closed connections -------------------------------------------------------------------------------------

    def eof_received(self) -> bool | None:
        """The client sends no more: it waits for its answer, or it has disconnected. `_watch` finds out which."""
        cycle = self.cycle
        if self.scheme == "https" or cycle is None or cycle.response_complete or cycle.more_body:
            return None  # the connection ends
        cycle.keep_alive = False
        self._watched = 0
        self._watch()
        return True

    def _watch(self) -> None:
        """Drop the connection if the client has disconnected; after a while without output, write a probe that makes a
        closed client reset the connection."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if _is_reset(self.transport):
            self.transport.abort()
            return
        interim = not self.cycle.response_started and self.scope["http_version"] != "1.0"
        if self._watched == _SILENT and interim:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._watched += 1
        self.loop.call_later(_WATCH_S, self._watch)

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            self.send_400_response("The headers are too many or too long.")

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(limits.HEADER_S, self._expired)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.abort()


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether the other end has reset the connection."""
    sock = transport.get_extra_info("socket")
    try:
        return sock is None or sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSED
    except OSError:
        return True
