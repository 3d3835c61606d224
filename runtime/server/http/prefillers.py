"""Prefillers: the header x-prefiller-host-port, by which routers of the Gateway API inference extension (llm-d) name
the server that computes a prompt before this one answers it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from fastapi import Request

from ...errors import UsageError
from ..api.errors import HttpError
from ..api.requests import ChatRequest, CompletionRequest, KVTransferParams
from ..engine.kv_file import KV_FOLDER, is_kv_name
from .streams import while_connected

log = logging.getLogger("icc.serve")
HEADER = "x-prefiller-host-port"
_TIMEOUT_S = 600.0
_MOST_BYTES = 1 << 20  # of an answer with one token
_PIECE = 1 << 20
_ADDRESS = re.compile(r"[A-Za-z0-9._-]{1,253}:\d{1,5}|\[[0-9A-Fa-f:]{2,45}\]:\d{1,5}")


class Prefillers:
    """Servers that may be named. addresses: HOST:PORT each; none: the header changes nothing. folder: where engine
    processes look for KV."""

    def __init__(self, addresses: Sequence[str] = (), folder: Path = KV_FOLDER) -> None:
        for address in addresses:
            if not _ADDRESS.fullmatch(address):
                raise UsageError(f"--prefiller {address!r} is no HOST:PORT", "give --prefiller 10.0.0.5:8000")
        self._addresses, self._folder = frozenset(addresses), folder

    async def completion(self, request: Request, body: CompletionRequest) -> CompletionRequest:
        """The body, with where the KV of its prompt is, if another server was to compute that and has."""
        params = await self._computed(request, msgspec.structs.replace(body, **_ONE_TOKEN, best_of=None))
        return body if params is None else msgspec.structs.replace(body, kv_transfer_params=params)

    async def chat(self, request: Request, body: ChatRequest) -> ChatRequest:
        """As `completion`."""
        one = msgspec.structs.replace(body, **_ONE_TOKEN, max_completion_tokens=None)
        params = await self._computed(request, one)
        return body if params is None else msgspec.structs.replace(body, kv_transfer_params=params)

    async def _computed(self, request: Request, body: CompletionRequest | ChatRequest) -> KVTransferParams | None:
        """Have a prompt computed, and its KV brought here; None where it is to be computed here. HttpError 403 for a
        server that may not be named, ClientGone."""
        address = request.headers.get(HEADER, "").split(",")[0].strip()
        if not address or not self._addresses:
            return None
        if address not in self._addresses:
            raise HttpError(403, f"{HEADER}: {address[:80]!r} is none of this server's --prefiller", HEADER)
        found: list[KVTransferParams | None] = []

        async def work() -> None:
            found.append(await self._ask(address, request, msgspec.json.encode(body)))

        await while_connected(request.receive, work())
        return found[0]

    async def _ask(self, address: str, request: Request, body: bytes) -> KVTransferParams | None:
        key = request.headers.get("authorization", "")
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await _sent(address, "POST", request.url.path, key, body)
                params = msgspec.json.decode(answer, type=_PrefillAnswer).kv_transfer_params
                if params is not None and params.remote_engine_id and is_kv_name(params.remote_engine_id):
                    await fetch(address, params.remote_engine_id, key, self._folder)
                    return params
        except (OSError, ValueError, msgspec.DecodeError, asyncio.IncompleteReadError) as error:
            log.warning("%s computes no prompt: %s", address, str(error) or type(error).__name__)
        return None


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: KVTransferParams | None = None


_ONE_TOKEN: dict[str, object] = {
    "max_tokens": 1,
    "n": 1,
    "stream": False,
    "stream_options": None,
    "kv_transfer_params": KVTransferParams(do_remote_decode=True),
}


async def fetch(address: str, name: str, key: str, folder: Path = KV_FOLDER) -> None:
    """Bring KV here that the server at an address has; nothing where it is here already, on one host. OSError or
    ValueError where it cannot be brought."""
    path, part = folder / name, folder / f"{name}.part"
    if path.exists():
        return
    reader, writer = await _asked(address, "GET", f"/v1/kv/{name}", key, b"")
    try:
        left = await _begun(reader)
        with open(part, "xb", opener=_private) as stream:
            while left:
                piece = await reader.read(min(left, _PIECE))
                if not piece:
                    raise ValueError("the KV was cut on its way")
                stream.write(piece)
                left -= len(piece)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
        writer.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


async def _asked(
    address: str, method: str, path: str, key: str, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    lines = [f"{method} {path} HTTP/1.1", f"host: {address}", "connection: close", f"content-length: {len(body)}"]
    lines += ["content-type: application/json", *([f"authorization: {key}"] if key else [])]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
    await writer.drain()
    return reader, writer


async def _begun(reader: asyncio.StreamReader) -> int:
    """The length of an answer's body. ValueError for another status than 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    status, length = head[0].split(" ")[1:2], headers.get("content-length", "")
    if status != ["200"] or not length.isdigit():
        raise ValueError(f"it answers {head[0][:80]!r}")
    return int(length)


async def _sent(address: str, method: str, path: str, key: str, body: bytes) -> bytes:
    reader, writer = await _asked(address, method, path, key, body)
    try:
        length = await _begun(reader)
        if length > _MOST_BYTES:
            raise ValueError(f"its answer has {length} bytes")
        return await reader.readexactly(length)
    finally:
        writer.close()
