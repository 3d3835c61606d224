"""/v1/kv: the KV of a prompt that is computed here, for a server on another host that decodes."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import AsyncIterator

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from ..api.errors import HttpError
from ..engine.kv_file import KEPT_S, open_kv
from ..engine.kv_gifts import KVGifts
from ..nixl.nixl import Nixl, NixlError
from .kv_fetch import KVOffer, KVPiece, folder_id

_MOST_WAIT_S = 30  # the longest wait for a prompt to begin
_CHUNK = 1 << 20
_WAIT = re.compile(r"wait=(\d{1,4})")  # RFC 7240


def add_kv(app: FastAPI, gifts: KVGifts, nixl: Nixl | None) -> None:
    """Add the routes. Keys are checked as for all routes, and names cannot be guessed. nixl: None if KV is only sent
    over HTTP."""

    async def check(name: str, request: Request) -> None:
        """HttpError 404 if there is no such KV, after waiting the seconds of `Prefer: wait` for it."""
        wait = _WAIT.search(request.headers.get("prefer", ""))
        if not await gifts.wait(name, min(int(wait[1]), _MOST_WAIT_S) if wait else 0):
            raise HttpError(404, "there is no such KV", code="kv_not_found")

    @app.get("/v1/kv/{name}", include_in_schema=False)
    async def kv(name: str, request: Request) -> Response:
        """The KV that `kv_transfer_params` names, streamed while its prompt runs; it can be read once."""
        await check(name, request)
        return StreamingResponse(_content(gifts, name), media_type="application/octet-stream")

    @app.get("/v1/kv/{name}/pieces", include_in_schema=False)
    async def pieces(name: str, request: Request, nixl_too: bool = False) -> Response:
        """Where the KV is: a line with a KVOffer and, for readers through NIXL, a line with a KVPiece for each piece as
        it is computed; the last one is empty. Pieces can be read until the KV is deleted."""
        await check(name, request)
        by = nixl if nixl_too else None
        return StreamingResponse(_pieces(gifts, name, by), media_type="application/x-ndjson")

    @app.delete("/v1/kv/{name}", include_in_schema=False)
    async def taken(name: str) -> Response:
        """Delete KV that was read, or is not needed any more."""
        gifts.remove(name)
        return Response(status_code=204)


async def _content(gifts: KVGifts, name: str) -> AsyncIterator[bytes]:
    """The bytes of a file as they are written; at the end the file is removed."""
    file = -1
    try:
        async for begin, end in gifts.pieces(name):
            file = open_kv(gifts.folder, name) if file < 0 else file
            while begin < end:
                data = os.pread(file, min(end - begin, _CHUNK), begin)
                if not data:
                    return  # the file is incomplete: the reader computes the rest
                begin += len(data)
                yield data
        gifts.remove(name)
    except (OSError, ValueError):
        return  # it was taken already, or removed because its prompt failed
    finally:
        if file >= 0:
            os.close(file)


async def _pieces(gifts: KVGifts, name: str, nixl: Nixl | None) -> AsyncIterator[bytes]:
    yield _line(KVOffer(folder_id(gifts.folder), nixl is not None))
    if nixl is None:
        return
    key = uuid.uuid4().hex
    try:
        async for begin, end in gifts.pieces(name):
            agent, address = await nixl.publish(key, gifts.folder / name, begin, end)
            yield _line(KVPiece(begin, end, agent, address))
        yield _line(KVPiece(0, 0))
        await gifts.taken(name, KEPT_S)
    except NixlError:
        return
    finally:
        nixl.forget(key)


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"
