"""AccessLog: wraps all routes; gives each request an id and a line in the log, and handles a proxy's path prefix."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..log import RequestContext, current_request, with_fields

log = logging.getLogger("icc.serve")
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_POLLED = frozenset({"/live", "/ready", "/health", "/metrics", "/figures"})  # polled: logged as DEBUG only


class AccessLog:
    """ASGI middleware. A request keeps its `X-Request-Id`, or gets a new one; the answer has it too.

    root_path: the path under which a proxy serves this server. Requests may come with it or without: proxies do either.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self._app, self._root = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        method = scope.get("method", "WEBSOCKET")
        if method == "HEAD":  # answered like GET; uvicorn drops the body
            scope = {**scope, "method": "GET"}
        scope["root_path"] = self._root
        if self._root and scope["path"].startswith(f"{self._root}/"):
            scope["path"] = scope["path"][len(self._root) :]
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request = RequestContext(given if _ID.fullmatch(given) else uuid.uuid4().hex, headers.get("traceparent", ""))
        current_request.set(request)  # for this request's task, and the tasks that it starts
        answer = _Answer(send, request.id)
        start = time.perf_counter()
        try:
            await self._app(scope, receive, answer.send)
        finally:
            level = logging.DEBUG if scope["path"] in _POLLED else logging.INFO
            if log.isEnabledFor(level):
                client = scope.get("client")
                fields = {
                    "method": method,
                    "path": scope["path"],
                    "status": answer.status,
                    "ms": round((time.perf_counter() - start) * 1e3, 1),
                    "client": client[0] if client else "",
                }
                aborted = {} if answer.complete else {"aborted": True}
                log.log(level, "request", extra=with_fields(**fields, **aborted, **request.fields))


class _Answer:
    """Notes the status of an answer, and adds the request's id to its headers."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._id = send, request_id.encode()
        self.status, self.complete = 0, False

    async def send(self, message: Message) -> None:
        if message["type"] == "websocket.accept":
            self.status = 101
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            self.status = message["status"]
            # Anthropic's clients read the second
            ids = [(b"x-request-id", self._id), (b"request-id", self._id)]
            message["headers"] = [*message.get("headers", ()), *ids]
        await self._send(message)
        self.complete = self.status == 101 or (
            message["type"].endswith("http.response.body") and not message.get("more_body", False)
        )
