"""Gate: what stands before every route. Keys, draining, a full queue, and answers for what no route expects."""

from __future__ import annotations

import logging

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.errors import HttpError, as_http
from ..api.keys import ApiKeys
from ..api.metrics import Metrics
from ..engine.admission import Admission, Overloaded
from .bodies import error_response
from .page_routes import OPEN_FILES, page_file

log = logging.getLogger("icc.serve")
OPEN = frozenset({"/live", "/ready"})  # for those who watch over the server; they say nothing else
# their requests wait for the engine
_QUEUED = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"}
    | {"/v1/rerank", "/rerank", "/v2/rerank"}
)
# a server that drains lives, and says so; it is not ready
_WHILE_DRAINING = {"/live", "/metrics", "/version"}
_SECURE = [
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'"),
]


class Gate:
    """ASGI middleware. The scope gets `icc.client`, the name of who asks."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, metrics: Metrics, admission: Admission) -> None:
        self._app, self._keys, self._metrics, self._admission = app, keys, metrics, admission
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        except ClientDisconnect:
            pass
        except Exception as error:
            if not isinstance(error, HttpError | Overloaded):
                log.error("a request failed: %s", type(error).__name__, exc_info=error)
            if begun:
                return
            found = as_http(error)
            if found.status == 401 and scope["path"] == "/" and "text/html" in Headers(scope=scope).get("accept", ""):
                response = page_file("/", 401)  # which asks for the key
                response.headers["www-authenticate"] = "Bearer"
            else:
                response = error_response(scope, found, {"www-authenticate": "Bearer"} if found.status == 401 else {})
            await response(scope, receive, counted)

    def _admit(self, scope: Scope) -> None:
        path = scope["path"]
        if path not in OPEN and path not in OPEN_FILES:
            client = self._keys.client(_authorization(Headers(scope=scope)))
            if client is None:
                raise HttpError(401, "give an API key: Authorization: Bearer KEY", code="invalid_api_key")
            scope["icc.client"] = client
        if self.draining and path not in _WHILE_DRAINING:
            raise HttpError(503, "the server is shutting down", code="draining", retry_after=5)
        if path in _QUEUED and scope["method"] == "POST":  # a refusal must not cost what the request would
            self._admission.check_room()


def _authorization(headers: Headers) -> bytes | None:
    """The one header that holds a key: Authorization, or x-api-key as Anthropic's clients send it."""
    given = [*headers.getlist("authorization"), *[f"Bearer {key}" for key in headers.getlist("x-api-key")]]
    return given[0].encode("latin-1") if len(given) == 1 else None
