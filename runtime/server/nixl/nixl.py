"""Nixl: the server's side of its NIXL process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import msgspec

from ...errors import IccError
from ...parent import deaf_to_signals
from ..engine.frames import Frames
from .library import check_nixl
from .messages import Failure, FetchBytes, Forget, FromMover, MoverReady, Publish, Published, frame

_START_S = 60.0


class NixlError(OSError):
    """NIXL failed; the message is NIXL's."""


class Nixl:
    """Publishes files in shared memory, and fetches what others have published. command: of the process, for tests;
    "{fd}" is replaced by the number of its socket's descriptor. MissingExtraError if NIXL is not installed."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        if command is None:
            check_nixl()
            # -P: nothing is imported from the current directory
            command = [sys.executable, "-P", "-m", f"{__package__}.mover_main", "{fd}"]
        self._command = command
        self._ids = count()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[None] | None = None
        self._asked: dict[int, asyncio.Future[FromMover]] = {}
        self._decoder = msgspec.msgpack.Decoder(FromMover)

    async def start(self) -> None:
        """Start the process. IccError if NIXL does not work here."""
        try:
            await self._started()
        except NixlError as error:
            hint = "see UCX_TLS and UCX_NET_DEVICES of UCX, or serve without --nixl"
            raise IccError(f"--nixl: {error}", hint) from None

    async def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if self._transport is not None:
            self._transport.close()
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def publish(self, key: str, path: Path, begin: int, end: int) -> tuple[bytes, int]:
        """Allow other agents to read bytes of a file; returns the agent's metadata and the address. NixlError if it
        fails."""
        found = await self._ask(Publish(next(self._ids), key, str(path), begin, end))
        assert isinstance(found, Published)
        return found.agent, found.address

    async def fetch(self, key: str, agent: bytes, address: int, path: Path, begin: int, end: int) -> None:
        """Read published memory of another agent into bytes of a file, which is created if need be. NixlError if it
        fails."""
        await self._ask(FetchBytes(next(self._ids), key, agent, address, str(path), begin, end))

    def forget(self, key: str) -> None:
        """Release all that was published or fetched under a key."""
        if self._transport is not None:
            self._transport.write(frame(Forget(key)))

    async def _ask(self, asked: Publish | FetchBytes) -> FromMover:
        await self._started()
        assert self._transport is not None
        answer = self._asked[asked.id] = asyncio.get_running_loop().create_future()
        self._transport.write(frame(asked))
        try:
            found = await answer
        finally:
            self._asked.pop(asked.id, None)
        if isinstance(found, Failure):
            raise NixlError(found.error)
        return found

    async def _started(self) -> None:
        """Wait until the process is ready; start it if it does not run."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
            await self._spawn()
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise NixlError(f"its process has not started within {_START_S:.0f} s") from None

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, deaf_to_signals():
            command = [part.replace("{fd}", str(theirs.fileno())) for part in self._command]
            # NIXL and UCX log to standard output
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno()
            )
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _MoverPipe(self), sock=ours)

    def take(self, body: bytes) -> None:
        """Handle a message from the process."""
        message = self._decoder.decode(body)
        if isinstance(message, MoverReady):
            if self._ready is not None and not self._ready.done():
                error = NixlError(message.error) if message.error else None
                self._ready.set_result(None) if error is None else self._ready.set_exception(error)
        elif (answer := self._asked.get(message.id)) is not None and not answer.done():
            answer.set_result(message)

    def lost(self) -> None:
        """Called when the connection is closed: the process has ended."""
        ready, self._ready, self._transport = self._ready, None, None
        error = NixlError("its process has ended")
        for waiting in (ready, *self._asked.values()):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
        if self._process is not None:
            self._process.poll()


class _MoverPipe(asyncio.Protocol):
    """The server's end of the socket."""

    def __init__(self, nixl: Nixl) -> None:
        self._nixl, self._frames = nixl, Frames()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._nixl.take(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._nixl.lost()
