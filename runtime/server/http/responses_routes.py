"""The routes of /v1/responses."""

from __future__ import annotations

from typing import Literal

import msgspec
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import Response

from ..api.openresponses.compact import CompactedResponse, CompactRequest
from ..api.openresponses.request import ResponsesRequest
from ..api.openresponses.resource import DeletedResponse, InputItems
from ..api.openresponses.resource import Response as ResponseResource
from .bodies import json_response
from .openapi import operation
from .parts import GENERATION_ERRORS, ServerParts
from .responses_socket import ResponsesSocket
from .streams import NAMED


class InputTokens(msgspec.Struct):
    """Answer of /v1/responses/input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


def add_responses(app: FastAPI, parts: ServerParts) -> None:
    """Add the routes of /v1/responses, and its web socket."""
    conversations, store = parts.conversations, parts.conversations.store

    @app.post("/v1/responses", **operation(ResponseResource, ResponsesRequest, errors=GENERATION_ERRORS, events=True))
    async def create(request: Request) -> Response:
        """Answer a conversation, or the next turn of a stored one."""
        body = await parts.read(request, ResponsesRequest)
        job, make = await conversations.begin(body, request.scope["icc.client"])
        return await parts.answer(request, job, make, body.stream, NAMED)

    @app.post("/v1/responses/input_tokens", **operation(InputTokens, ResponsesRequest, errors=(400, 404, 408, 413)))
    async def input_tokens(request: Request) -> Response:
        """The number of tokens of a request's prompt."""
        body = await parts.read(request, ResponsesRequest)
        return json_response(InputTokens(await conversations.count(body, request.scope["icc.client"])))

    @app.post("/v1/responses/compact", **operation(CompactedResponse, CompactRequest, errors=GENERATION_ERRORS))
    async def compact(request: Request) -> Response:
        """Summarize a conversation, for later requests that continue it."""
        body = await parts.read(request, CompactRequest)
        job, make = await conversations.compact(body, request.scope["icc.client"])
        return await parts.answer(request, job, make, False)

    @app.websocket("/v1/responses")
    async def socket(websocket: WebSocket) -> None:
        """Responses over a WebSocket, as events; each message asks for one response."""
        await ResponsesSocket(parts, websocket).serve()

    @app.get("/v1/responses/{response_id}", **operation(ResponseResource, errors=(404,)))
    async def one(request: Request, response_id: str) -> Response:
        """A stored response."""
        return json_response(store.find(request.scope["icc.client"], response_id).response)

    @app.delete("/v1/responses/{response_id}", **operation(DeletedResponse, errors=(404,)))
    async def delete(request: Request, response_id: str) -> Response:
        """Delete a stored response."""
        store.delete(request.scope["icc.client"], response_id)
        return json_response(DeletedResponse(response_id))

    @app.get("/v1/responses/{response_id}/input_items", **operation(InputItems, errors=(404,)))
    async def input_items(request: Request, response_id: str) -> Response:
        """The input of a stored response."""
        stored = store.find(request.scope["icc.client"], response_id)
        data = stored.input_items()
        if request.query_params.get("order") != "asc":
            data.reverse()
        return json_response(InputItems(data, data[0]["id"], data[-1]["id"]))
