"""Channel: the engine process's end of the socket. It never blocks a step."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from threading import Lock

import msgspec

from .frames import SocketFrames
from .messages import FromEngine, ToEngine, encode

_MAX_UNSENT = 256 << 20  # bytes; more unsent data means that the other side no longer reads


class ChannelClosed(Exception):
    """The HTTP process has ended, or has stopped reading."""


class Channel:
    """Messages over a connected socket. Bytes that the socket does not accept now are kept and sent with the next
    message. Any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._frames = SocketFrames(connection)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._unsent = bytearray()
        self._sending = Lock()

    def send(self, message: FromEngine) -> None:
        """Send a message. ChannelClosed if too many bytes are unsent."""
        with self._sending:
            self._unsent += encode(message)
            if len(self._unsent) > _MAX_UNSENT:
                raise ChannelClosed("the HTTP process reads no more")
            self._flush()

    def receive(self, timeout: float) -> Iterator[ToEngine]:
        """The messages that have arrived, after waiting up to `timeout` seconds for the first. ChannelClosed if the
        other side has closed."""
        writers = [self._socket] if self._unsent else []
        readable, writable, _ = select.select([self._socket], writers, [], timeout)
        if writable:
            with self._sending:
                self._flush()
        if not readable:
            return
        try:
            bodies = self._frames.read()
        except BlockingIOError:
            return
        except EOFError as error:
            raise ChannelClosed("the HTTP process has gone") from error
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        for body in bodies:
            yield self._decoder.decode(body)

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosed(str(error)) from error
