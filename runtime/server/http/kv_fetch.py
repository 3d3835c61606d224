"""Fetches the KV of a prompt from the server that computes it, while it computes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from ..engine.kv_file import KV_FOLDER
from ..nixl.nixl import Nixl, NixlError

log = logging.getLogger("icc.serve")
_MOST_LINE = 1 << 20  # bytes
_PIECE = 1 << 20
_DROP_S = 10.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# in seconds: an idle connection to a host that is gone fails after half a minute
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class KVOffer(msgspec.Struct, frozen=True):
    """Where KV is stored. folder: a `folder_id`; nixl: whether it can be read through NIXL."""

    folder: str
    nixl: bool


class KVPiece(msgspec.Struct, frozen=True):
    """Bytes `begin` to `end` of the KV's file are at `address` of a NIXL agent. An empty agent: no more pieces come."""

    begin: int
    end: int
    agent: bytes = b""
    address: int = 0


def folder_id(folder: Path) -> str:
    """A hash that identifies a folder among all hosts and containers, and the user who can read its files."""
    found, boot = os.stat(folder), _BOOT.read_text() if _BOOT.exists() else socket.gethostname()
    return blake2b(f"{boot} {found.st_dev} {found.st_ino} {os.geteuid()}".encode(), digest_size=16).hexdigest()


class FetchAnswer:
    """The body of an HTTP answer that has begun with status 200."""

    def __init__(self, reader: asyncio.StreamReader, length: int | None) -> None:
        """length: in bytes; None for a chunked body."""
        self._reader, self._length = reader, length

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives. ValueError if it is incomplete."""
        if self._length is None:
            while size := await self._chunk_size():
                left = size
                while left:
                    left -= len(data := await self._some(left))
                    yield data
                await self._reader.readexactly(2)
            return
        left = self._length
        while left:
            left -= len(data := await self._some(left))
            yield data

    async def whole(self, most: int) -> bytes:
        """The whole body. ValueError if it has more than `most` bytes, or is incomplete."""
        found = bytearray()
        async for data in self.pieces():
            found += data
            if len(found) > most:
                raise ValueError(f"its answer has more than {most} bytes")
        return bytes(found)

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines of the body. ValueError for a line that is too long, and as `pieces`."""
        rest = b""
        async for data in self.pieces():
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line
            if len(rest) > _MOST_LINE:
                raise ValueError("its answer has a long line")

    async def _chunk_size(self) -> int:
        line = await self._reader.readline()
        if not line:
            raise ValueError("the answer was cut")
        size = int(line.split(b";")[0], 16)
        if size < 0:
            raise ValueError("its answer has a chunk of negative size")
        return size

    async def _some(self, left: int) -> bytes:
        data = await self._reader.read(min(left, _PIECE))
        if not data:
            raise ValueError("the answer was cut")
        return data


@contextlib.asynccontextmanager
async def asked(
    address: str, method: str, path: str, key: str, body: bytes = b"", headers: tuple[str, ...] = ()
) -> AsyncIterator[FetchAnswer]:
    """Send a request to another server over plain HTTP. key: the header `authorization`, "" for none. OSError if the
    server cannot be reached, ValueError for another status than 200 or 204, EOFError without an answer."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_PIECE)
    try:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # macOS lacks some of them
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        lines = [f"{method} {path} HTTP/1.1", f"host: {address}", "connection: close", f"content-length: {len(body)}"]
        lines += ["content-type: application/json", *([f"authorization: {key}"] if key else []), *headers]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await writer.drain()
        yield FetchAnswer(reader, await _begun(reader))
    finally:
        writer.close()


async def _begun(reader: asyncio.StreamReader) -> int | None:
    """Read the head of an answer; returns the length of its body in bytes, None for a chunked body."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except asyncio.LimitOverrunError:
        raise ValueError("it does not speak HTTP") from None
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    status, length = head[0].split(" ")[1:2], fields.get("content-length", "")
    if status == ["204"]:
        return 0
    if status == ["200"] and fields.get("transfer-encoding", "").lower() == "chunked":
        return None
    if status != ["200"] or not length.isdigit():
        raise ValueError(f"it answers {head[0][:80]!r}")
    return int(length)


class KVFetcher:
    """Fetches KV into the folder that engine processes read. nixl: for servers that have NIXL; None: only HTTP."""

    def __init__(self, folder: Path = KV_FOLDER, nixl: Nixl | None = None) -> None:
        self._folder, self._nixl = folder, nixl
        self._dropping: set[asyncio.Task[None]] = set()
        self._without: set[str] = set()  # servers without NIXL for which a warning was logged

    async def fetch(self, address: str, name: str, key: str, wait_s: int = 0) -> None:
        """Fetch KV that the server at an address has or is computing; does nothing if both servers use the same folder.
        wait_s: how long its prompt may take to begin. The parts received so far are kept if this is cancelled or fails.
        OSError, ValueError or EOFError if the KV is incomplete."""
        part = self._folder / f"{name}.part"
        headers = (f"prefer: wait={wait_s}",) if wait_s else ()
        path = f"/v1/kv/{name}"
        wish = "?nixl_too=true" if self._nixl is not None else ""
        begun = False
        try:
            async with asked(address, "GET", f"{path}/pieces{wish}", key, headers=headers) as answer:
                lines = answer.lines()
                offer = msgspec.json.decode(await anext(lines, b""), type=KVOffer)
                if offer.folder == folder_id(self._folder):
                    return
                begun = True
                read = await self._by_nixl(address, offer, lines, part)
            if read:
                async with asked(address, "DELETE", path, key):
                    return
            part.unlink(missing_ok=True)
            async with asked(address, "GET", path, key) as answer:
                with open(part, "xb", opener=_private) as stream:
                    async for data in answer.pieces():
                        stream.write(data)
                        stream.flush()  # a part is useful even if no more comes
        except BaseException:
            if begun:
                task = asyncio.create_task(_drop(address, path, key))
                self._dropping.add(task)
                task.add_done_callback(self._dropping.discard)
            raise
        finally:
            if part.exists():
                part.rename(self._folder / name)

    async def _by_nixl(self, address: str, offer: KVOffer, lines: AsyncIterator[bytes], part: Path) -> bool:
        """Fetch the pieces in `lines` through NIXL; returns False if HTTP must be used instead."""
        nixl = self._nixl
        if nixl is None:
            return False
        if not offer.nixl:
            if address not in self._without:
                self._without.add(address)
                log.warning("%s has no NIXL: KV comes from there over HTTP", address)
            return False
        key = uuid.uuid4().hex
        try:
            async for line in lines:
                piece = msgspec.json.decode(line, type=KVPiece)
                if not piece.agent:
                    return True
                await nixl.fetch(key, piece.agent, piece.address, part, piece.begin, piece.end)
            raise NixlError("it has stopped")
        except NixlError as error:
            log.warning("%s: the KV comes over HTTP, as NIXL failed: %s", address, error)
            return False
        finally:
            nixl.forget(key)


async def _drop(address: str, path: str, key: str) -> None:
    """Tell a server, if it still answers, to delete its KV."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        async with asyncio.timeout(_DROP_S), asked(address, "DELETE", path, key):
            pass


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
