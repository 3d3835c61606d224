"""POST /v1/refit and /v1/engine: the server changes to other weights, or to another engine of the same model."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..api.changes import EngineChanges
from ..api.requests import EngineRequest, RefitRequest
from ..api.responses import Status
from .bodies import decode_body, json_response
from .openapi import operation

_ERRORS = (400, 403, 409, 413, 503)


def add_changes(app: FastAPI, changes: EngineChanges) -> None:
    """Add /v1/refit and /v1/engine."""

    @app.post("/v1/refit", **operation(Status, RefitRequest, errors=_ERRORS))
    async def refit(request: Request) -> Response:
        """Load the engine again from its directory, which now has other weights of the same model."""
        body = await decode_body(request, RefitRequest)
        await asyncio.shield(changes.refit(body.wait_s))
        return json_response(Status("refitted"))

    @app.post("/v1/engine", **operation(Status, EngineRequest, errors=_ERRORS))
    async def change(request: Request) -> Response:
        """Load another engine of the same model, from a directory beside the served one, replica by replica."""
        body = await decode_body(request, EngineRequest)
        await asyncio.shield(changes.change(body.engine, body.wait_s))
        return json_response(Status("changed"))
