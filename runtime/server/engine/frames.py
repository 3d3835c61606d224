"""Frames: messages in a stream of bytes, each behind its length in four bytes, the least significant first."""

from __future__ import annotations

import socket

MAX_FRAME = 64 << 20  # bytes; nothing that the processes say is longer
_AT_ONCE = 1 << 20  # bytes read at a time


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The bodies that are complete now. ValueError if the stream is no sequence of frames."""
        self._buffer += data
        bodies, at = [], 0
        while len(self._buffer) >= at + 4:
            size = int.from_bytes(self._buffer[at : at + 4], "little")
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes")
            if len(self._buffer) < at + 4 + size:
                break
            bodies.append(bytes(self._buffer[at + 4 : at + 4 + size]))
            at += 4 + size
        del self._buffer[:at]
        return bodies


class SocketFrames(Frames):
    """Reads them from a socket, always into the same memory.

    `recv` takes room for the most that may come and gives back what was not needed. What is allocated meanwhile keeps
    the C library from using that room again: a process grew by 200 bytes with every request, without end.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._socket, self._read = connection, bytearray(_AT_ONCE)

    def read(self) -> list[bytes]:
        """The bodies that are complete with what is there now. EOFError if the other side has closed; ValueError as
        `feed`; OSError as the socket's."""
        count = self._socket.recv_into(self._read)
        if not count:
            raise EOFError("the other side has closed the socket")
        return self.feed(memoryview(self._read)[:count])
