"""RefuseChanges: refuses what one replica of several must not do alone, because the others would not change with it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ..server.api.errors import HttpError
from ..server.http.bodies import error_response

_DEPLOY = "this would change one replica of several: deploy the engine again, with icc serve ENGINE --ray"
_ADAPTERS = "this would change one replica of several: serve with --lora or --lora-dir"
_PATHS = {
    "/v1/engine": _DEPLOY,
    "/v1/refit": _DEPLOY,
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
    "/lora-adapters": _ADAPTERS,
}


class RefuseChanges:
    """ASGI middleware, after the key check: answers 409 to requests that change what a server serves."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        words = _PATHS.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        if words is None:
            return await self._app(scope, receive, send)
        await error_response(scope, HttpError(409, words, code="many_replicas"))(scope, receive, send)
