"""Frames: messages in a stream of bytes, each after its length in four bytes, little-endian."""

from __future__ import annotations

import socket

MAX_FRAME = 64 << 20  # bytes; no message between the processes is longer
_AT_ONCE = 1 << 20  # bytes read at a time


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Add data; returns the bodies that are now complete. ValueError if the stream is not a sequence of frames."""
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
    """Reads frames from a socket, always into the same buffer.

    `recv` allocates the largest size and frees the unused rest. Other allocations in between keep the C library from
    reusing that memory: the process grew by 200 bytes per request without end.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._socket, self._read = connection, bytearray(_AT_ONCE)

    def read(self) -> list[bytes]:
        """Read what has arrived; returns the bodies that are now complete. EOFError if the other side has closed;
        ValueError as `feed`; OSError of the socket."""
        count = self._socket.recv_into(self._read)
        if not count:
            raise EOFError("the other side has closed the socket")
        return self.feed(memoryview(self._read)[:count])
