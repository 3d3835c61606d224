"""The routes of Ollama's API, which desktop and editor clients use."""

from __future__ import annotations

from functools import partial

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..api.asking import R
from ..api.errors import HttpError
from ..api.ollama.answer import OllamaAnswer, OllamaChatLine, OllamaErrorBody, OllamaGenerateLine, loaded
from ..api.ollama.convert import chat_request, check_context, embedding_request, prompt_request
from ..api.ollama.embed import OllamaEmbedded, OllamaEmbedding, embed_answer, embedding_answer
from ..api.ollama.models import (
    API_VERSION,
    OllamaProcesses,
    OllamaShown,
    OllamaTags,
    OllamaVersion,
    plain_name,
    processes,
    shown,
    tags,
)
from ..api.ollama.request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from ..api.requests import ChatRequest
from .bodies import decode_body, json_response
from .openapi import operation
from .parts import GENERATION_ERRORS, ServerParts
from .streams import LINES

_documented = partial(operation, error_body=OllamaErrorBody)
_FILES = ("pull", "push", "create", "copy", "delete")  # operations on files of models, which engines are not


def add_ollama(app: FastAPI, parts: ServerParts) -> None:
    """Add the routes of Ollama's API, /api."""
    _add_models(app, parts)
    if parts.model.task == "generate":
        _add_chat(app, parts)
        _add_generate(app, parts)
    if parts.model.task == "embed":
        _add_embed(app, parts)
    for name in _FILES:
        app.add_api_route(f"/api/{name}", _refuse, methods=["POST", "DELETE"], include_in_schema=False)


async def _read(parts: ServerParts, request: Request, kind: type[R]) -> R:
    """The decoded body, with the name of a served model."""
    body = await decode_body(request, kind)
    known = body.model in parts.model.names
    return parts.jobs.named(body if known else msgspec.structs.replace(body, model=plain_name(body.model)))  # type: ignore[type-var]


async def _refuse() -> None:
    raise HttpError(404, "this server has one engine, which `icc compile` makes", code="unsupported")


def _add_models(app: FastAPI, parts: ServerParts) -> None:
    @app.get("/api/version", **_documented(OllamaVersion))
    async def version() -> Response:
        """The version of Ollama whose API this is."""
        return json_response(OllamaVersion(API_VERSION))

    @app.get("/api/tags", **_documented(OllamaTags))
    async def list_models() -> Response:
        """The served model, listed once under each of its names, and the loaded adapters."""
        names = [*parts.model.names, *(adapter.name for adapter in parts.adapters.all)]
        return json_response(tags(parts.model, parts.changes.manifest, names))

    @app.get("/api/ps", **_documented(OllamaProcesses))
    async def running() -> Response:
        """The model that is loaded."""
        return json_response(processes(parts.model, parts.changes.manifest))

    @app.post("/api/show", **_documented(OllamaShown, OllamaShowRequest, errors=(400, 404, 408, 413)))
    async def show(request: Request) -> Response:
        """What the model is and can do."""
        body = await decode_body(request, OllamaShowRequest)
        parts.jobs.check_model(plain_name(body.model or body.name or parts.model.name))
        return json_response(shown(parts.model, parts.changes.manifest))


def _add_chat(app: FastAPI, parts: ServerParts) -> None:
    documented = _documented(OllamaChatLine, OllamaChatRequest, errors=GENERATION_ERRORS, lines=True)

    @app.post("/api/chat", **documented)
    async def chat(request: Request) -> Response:
        """Answer a conversation, as Ollama does: in lines, unless `stream` is false."""
        body = await _read(parts, request, OllamaChatRequest)
        if not body.messages:
            check_context(body.options, parts.model)
            return json_response(loaded(OllamaChatLine, body.model))
        asked = chat_request(body, parts.model)
        job = await parts.jobs.chat(asked, request.scope["icc.client"])
        make = partial(OllamaAnswer, parts.model, asked, job, OllamaChatLine)
        return await parts.answer(request, job, make, body.stream is not False, LINES)


def _add_generate(app: FastAPI, parts: ServerParts) -> None:
    documented = _documented(OllamaGenerateLine, OllamaGenerateRequest, errors=GENERATION_ERRORS, lines=True)

    @app.post("/api/generate", **documented)
    async def generate(request: Request) -> Response:
        """Answer or complete a prompt, as Ollama does: in lines, unless `stream` is false."""
        body = await _read(parts, request, OllamaGenerateRequest)
        asked = prompt_request(body, parts.model)
        if not body.prompt and not body.suffix:
            return json_response(loaded(OllamaGenerateLine, body.model))
        client = request.scope["icc.client"]
        is_chat = isinstance(asked, ChatRequest)
        job = await (parts.jobs.chat(asked, client) if is_chat else parts.jobs.completion(asked, client))
        make = partial(OllamaAnswer, parts.model, asked, job, OllamaGenerateLine)
        return await parts.answer(request, job, make, body.stream is not False, LINES)


def _add_embed(app: FastAPI, parts: ServerParts) -> None:
    errors = (*GENERATION_ERRORS, 504)

    @app.post("/api/embed", **_documented(OllamaEmbedded, OllamaEmbedRequest, errors=errors))
    async def embed(request: Request) -> Response:
        """The vectors of texts, of length 1. Without texts, no vectors: clients use that to load a model."""
        body = await _read(parts, request, OllamaEmbedRequest)
        if not body.input:
            return json_response(OllamaEmbedded(body.model, [], 0, 0, 0))
        asked = embedding_request(body, parts.model)
        job = await parts.jobs.embedding(asked, request.scope["icc.client"])
        return await parts.encoded(request, embed_answer(parts.generator, job, asked))

    @app.post("/api/embeddings", **_documented(OllamaEmbedding, OllamaEmbeddingsRequest, errors=errors))
    async def embeddings(request: Request) -> Response:
        """The vector of a text, as the model computes it; an empty one without a text."""
        body = await _read(parts, request, OllamaEmbeddingsRequest)
        if not body.prompt:
            return json_response(OllamaEmbedding([]))
        asked = embedding_request(body, parts.model)
        job = await parts.jobs.embedding(asked, request.scope["icc.client"])
        return await parts.encoded(request, embedding_answer(parts.generator, job))
