"""POST /v1/refit: the server takes up the weights that `icc refit` has put into its engine."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..api.refits import Refits
from ..api.requests import RefitRequest
from ..api.responses import Status
from .bodies import decode_body, json_response
from .openapi import operation


def add_refit(app: FastAPI, refits: Refits) -> None:
    """Add /v1/refit."""

    @app.post("/v1/refit", **operation(Status, RefitRequest, errors=(400, 403, 409, 413, 503)))
    async def refit(request: Request) -> Response:
        """Load the engine anew from its directory, which has other weights of the same model now."""
        body = await decode_body(request, RefitRequest)
        await asyncio.shield(refits.refit(body.wait_s))
        return json_response(Status("refitted"))
