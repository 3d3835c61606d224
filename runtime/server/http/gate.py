"""ClientGate: the checks before every route, and answers for unexpected errors."""

from __future__ import annotations

import logging
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.errors import HttpError, as_http
from ..api.gate import RequestGate
from ..api.metrics import Metrics
from ..engine.admission import Overloaded
from .bodies import error_response
from .page_routes import OPEN_FILES, page_file

log = logging.getLogger("icc.serve")
OPEN = frozenset({"/live", "/ready"})  # for monitoring, without a key; they reveal nothing else
# their requests wait for the engine
_QUEUED = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/responses/compact",
    "/v1/messages", "/v1/rerank", "/rerank", "/v2/rerank", "/embed",
    "/v1/decisions", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings",
})  # fmt: skip
# paths that still answer while the server drains; /ready does not
_WHILE_DRAINING = {"/live", "/metrics", "/version"}
_SECURE = [
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'"),
]


class ClientGate:
    """ASGI middleware. Sets `icc.client` in the scope, the name of the client."""

    def __init__(self, app: ASGIApp, gate: RequestGate, metrics: Metrics, origins: Collection[str] = ()) -> None:
        self._app, self._gate, self._metrics, self._origins = app, gate, metrics, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._connect(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._metrics.responded(message["status"])
                message["headers"] = [*message.get("headers", ()), *_SECURE]
            await send(message)

        try:
            self._admit(scope)
            await self._app(scope, receive, counted)
        except Exception as error:
            if not isinstance(error, HttpError | Overloaded):
                log.error("a request failed: %s", type(error).__name__, exc_info=error)
            if begun:
                return
            found = as_http(error)
            if found.status == 401 and scope["path"] == "/" and "text/html" in Headers(scope=scope).get("accept", ""):
                response = page_file("/", 401)  # the page asks for the key
                response.headers["www-authenticate"] = "Bearer"
            else:
                response = error_response(scope, found, {"www-authenticate": "Bearer"} if found.status == 401 else {})
            await response(scope, receive, counted)

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit a WebSocket. Browsers open one for any page and CORS does not apply, so the origin is checked here."""
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = origin is None or urlsplit(origin).netloc == headers.get("host")
        try:
            if not allowed and "*" not in self._origins and origin not in self._origins:
                raise HttpError(403, f"pages of {origin!r} may not ask here", code="origin_not_allowed")
            self._admit(scope)
        except HttpError as error:
            self._metrics.responded(error.status)
            await error_response(scope, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        path = scope["path"]
        if path not in OPEN and path not in OPEN_FILES:
            headers = Headers(scope=scope)
            scope["icc.client"] = self._gate.client(headers.getlist("authorization"), headers.getlist("x-api-key"))
        if path not in _WHILE_DRAINING:
            self._gate.check_running()
        if path in _QUEUED and scope.get("method") == "POST":
            self._gate.check_room()
