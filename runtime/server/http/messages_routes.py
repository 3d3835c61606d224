"""The routes of /v1/messages."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..api.anthropic.answer import AnthropicErrorBody, Message, MessagesAnswer, TokenCount
from ..api.anthropic.chat import chat_request
from ..api.anthropic.marks import marks_of
from ..api.anthropic.request import CountTokensRequest, MessagesRequest
from ..api.keeping import kept_until
from .bodies import json_response
from .openapi import operation
from .parts import GENERATION_ERRORS, ServerParts
from .streams import Framing

_FRAMING = Framing(named=True, mark=b"")


def add_messages(app: FastAPI, parts: ServerParts) -> None:
    """Add the routes of Anthropic's API, /v1/messages."""
    documented = operation(
        Message, MessagesRequest, errors=GENERATION_ERRORS, events=True, error_body=AnthropicErrorBody
    )

    @app.post("/v1/messages", **documented)
    async def create(request: Request) -> Response:
        """Answer a conversation, as Anthropic's API does."""
        body = await parts.read(request, MessagesRequest)
        chat = chat_request(body)
        job = await parts.jobs.chat(chat, request.scope["icc.client"])
        if marks := marks_of(body):
            job = await kept_until(job, parts.jobs, marks, parts.engine.block_tokens)
        return await parts.answer(request, job, partial(MessagesAnswer, parts.model, chat, job), body.stream, _FRAMING)

    documented = operation(TokenCount, CountTokensRequest, errors=(400, 404, 408, 413), error_body=AnthropicErrorBody)

    @app.post("/v1/messages/count_tokens", **documented)
    async def count(request: Request) -> Response:
        """The number of tokens of a conversation."""
        body = await parts.read(request, CountTokensRequest)
        return json_response(TokenCount(len(await parts.jobs.chat_tokens(chat_request(body)))))
