"""The route of /v1/decisions."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..api.decisions.answer import Decision, decided, decision_jobs
from ..api.decisions.request import DecisionRequest
from .openapi import operation
from .parts import GENERATION_ERRORS, ServerParts


def add_decisions(app: FastAPI, parts: ServerParts) -> None:
    """Add /v1/decisions."""

    @app.post("/v1/decisions", **operation(Decision, DecisionRequest, errors=(*GENERATION_ERRORS, 504)))
    async def decisions(request: Request) -> Response:
        """The model's answers to 1 to 400 questions about one input, as probabilities."""
        body = await parts.read(request, DecisionRequest)
        jobs = await decision_jobs(parts.jobs, body, request.scope["icc.client"])
        return await parts.encoded(request, decided(parts.generator, jobs, body))
