"""RouteApp: HAProxy asks it which replica gets a request. An ASGI application in a Ray Serve deployment of its own."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from .asked import read_asked

log = logging.getLogger("icc.serve")
_PATH = "/internal/route"  # the path that Ray's HAProxy requests


class RouteApp:
    """handle: of the deployment among whose replicas a PrefixRouter chooses."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] != _PATH:
            return await _answer(send, 404, {"detail": "not found"})
        body = await _read(receive)
        try:
            async with self._handle.choose_replica(read_asked(body), _reserve=False) as found:
                replica = found._replica
                where = replica.backend_http_endpoint
                name = replica.replica_id.to_full_id_str()
        except Exception as error:  # HAProxy must get an answer after any error
            log.warning("no replica for a request: %s", error)
            return await _answer(send, 503, {"detail": str(error)[:300]})
        if where is None:
            return await _answer(send, 503, {"detail": "the replica has no address"})
        await _answer(send, 200, {"host": where[0], "port": where[1], "replica_id": name})


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _answer(send: Send, status: int, found: dict[str, Any]) -> None:
    body = msgspec.json.encode(found)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Front:
    """The deployment of a RouteApp."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        handle._init()  # now, not with the first request

    def __serve_build_asgi_app__(self) -> RouteApp:
        """The application that answers HAProxy."""
        return RouteApp(self._handle)
