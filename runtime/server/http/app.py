"""The FastAPI application: routes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from .... import __version__
from ...errors import IccError
from ..api.answers import ChatAnswer, CompletionAnswer
from ..api.embeddings import embedding_answer
from ..api.errors import HttpError, as_http
from ..api.generate import Generator, whole_answer
from ..api.jobs import Job, Jobs
from ..api.metrics import Metrics
from ..api.model import ServedModel
from ..api.requests import ChatRequest, CompletionRequest, DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from ..api.responses import (
    ChatCompletion,
    Completion,
    Detokenized,
    EmbeddingList,
    Model,
    ModelList,
    Status,
    Tokenized,
    Version,
)
from ..batches.batches import Batches
from ..engine.engine_client import EngineClient
from .batch_routes import add_batches
from .bodies import decode_body, json_response
from .openapi import document, operation
from .page_routes import add_page
from .streams import EventStream, while_connected


@dataclass(frozen=True)
class Parts:
    """What the routes work with."""

    model: ServedModel
    engine: EngineClient
    jobs: Jobs
    generator: Generator
    metrics: Metrics
    batches: Batches | None = None


def build_app(parts: Parts) -> FastAPI:
    """All routes over the parts. The gate goes around it."""
    app = FastAPI(title="icc", version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.openapi = lambda: document(app, parts.model)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _plain_error)
    for kind in (IccError, Exception):  # the latter goes on to the gate, which logs it
        app.add_exception_handler(kind, _error)
    _add_state(app, parts)
    _add_models(app, parts)
    if parts.model.embeds:
        _add_embeddings(app, parts)
        _refuse(app, parts, False, "/v1/completions", "/v1/chat/completions")
    else:
        _add_generation(app, parts)
        _refuse(app, parts, True, "/v1/embeddings")
    _add_tokens(app, parts)
    add_page(app, parts.model, parts.engine, parts.metrics)
    if parts.batches is not None:
        add_batches(app, parts.batches)
    app.openapi()  # now, rather than while somebody waits
    return app


def _add_state(app: FastAPI, parts: Parts) -> None:
    @app.get("/live", **operation(Status))
    async def live() -> Response:
        """Whether the server answers at all."""
        return json_response(Status("live"))

    @app.get("/health", **operation(Status, errors=(503,)))  # what GuideLLM and others ask, with their key
    @app.get("/ready", **operation(Status, errors=(503,)))
    async def ready() -> Response:
        """Whether the engine is loaded and can take requests."""
        if parts.engine.facts is None:
            raise HttpError(503, "the engine is not ready", code="not_ready", retry_after=1)
        return json_response(Status("ready"))

    @app.get("/version", **operation(Version))
    async def show_version() -> Response:
        """What is served, and by which icc."""
        manifest = parts.model.manifest
        found = Version(__version__, parts.model.name, manifest.target, manifest.quantization.method)
        return json_response(found)

    @app.get("/metrics", **operation(None))
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(parts.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_models(app: FastAPI, parts: Parts) -> None:
    def entry() -> Model:
        return Model(parts.model.name, parts.model.created, parts.model.max_len)

    @app.get("/v1/models", **operation(ModelList))
    async def models() -> Response:
        """The model that is served."""
        return json_response(ModelList([entry()]))

    @app.get("/v1/models/{model}", **operation(Model, errors=(404,)))
    async def one_model(model: str) -> Response:
        """The model of that name."""
        _check_model(parts, model)
        return json_response(entry())


_GENERATION_ERRORS = (400, 404, 408, 413, 429, 500, 503)


def _add_generation(app: FastAPI, parts: Parts) -> None:
    @app.post("/v1/completions", **operation(Completion, CompletionRequest, errors=_GENERATION_ERRORS, events=True))
    async def completions(request: Request) -> Response:
        """Complete one or several prompts."""
        body = await decode_body(request, CompletionRequest)
        _check_model(parts, body.model)
        job = await parts.jobs.completion(body, request.scope["icc.client"])
        return await _answer(parts, request, body, job, lambda stream: CompletionAnswer(parts.model, body, job, stream))

    @app.post("/v1/chat/completions", **operation(ChatCompletion, ChatRequest, errors=_GENERATION_ERRORS, events=True))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = await decode_body(request, ChatRequest)
        _check_model(parts, body.model)
        job = await parts.jobs.chat(body, request.scope["icc.client"])
        return await _answer(parts, request, body, job, lambda stream: ChatAnswer(parts.model, body, job, stream))


def _add_embeddings(app: FastAPI, parts: Parts) -> None:
    @app.post("/v1/embeddings", **operation(EmbeddingList, EmbeddingRequest, errors=(*_GENERATION_ERRORS, 504)))
    async def embeddings(request: Request) -> Response:
        """The vector of each text."""
        body = await decode_body(request, EmbeddingRequest)
        _check_model(parts, body.model)
        job = await parts.jobs.embedding(body, request.scope["icc.client"])
        answers: list[bytes] = []

        async def work() -> None:
            answers.append(await embedding_answer(parts.generator, job, body))

        await while_connected(request.receive, work())
        return Response(answers[0], media_type="application/json")


def _refuse(app: FastAPI, parts: Parts, embeds: bool, *paths: str) -> None:
    """What the engine was not compiled for: that is said, rather than that the path is unknown."""

    async def refuse() -> None:
        parts.model.check_task(embeds)

    for path in paths:
        app.add_api_route(path, refuse, methods=["POST"], include_in_schema=False)


async def _answer(
    parts: Parts, request: Request, body: CompletionRequest | ChatRequest, job: Job, make: Callable[..., Any]
) -> Response:
    if body.stream:
        options = body.stream_options
        return EventStream(parts.generator, job, make, bool(options and options.include_usage))
    answers: list[msgspec.Struct] = []

    async def work() -> None:
        answers.append(await whole_answer(parts.generator, job, make))

    await while_connected(request.receive, work())
    return json_response(answers[0])


def _add_tokens(app: FastAPI, parts: Parts) -> None:
    @app.post("/tokenize", **operation(Tokenized, TokenizeRequest, errors=(400, 404, 408, 413)))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text."""
        body = await decode_body(request, TokenizeRequest)
        _check_model(parts, body.model)
        tokens = await parts.jobs.encode(body.prompt, body.add_special_tokens)
        return json_response(Tokenized(tokens, len(tokens), parts.model.max_len))

    @app.post("/detokenize", **operation(Detokenized, DetokenizeRequest, errors=(400, 404, 408, 413)))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await decode_body(request, DetokenizeRequest)
        _check_model(parts, body.model)
        if parts.model.tokenizer is None or any(token >= parts.model.vocab_size for token in body.tokens):
            raise HttpError(400, "there is a token id that the vocabulary does not have", "tokens", "invalid_value")
        return json_response(Detokenized(parts.model.text(body.tokens)))


def _check_model(parts: Parts, name: str | None) -> None:
    if name is not None and name != parts.model.name:
        shown = repr(name[:80])
        raise HttpError(
            404, f"the model {shown} does not exist; this server has {parts.model.name!r}", "model", "model_not_found"
        )


async def _error(request: Request, error: Exception) -> Response:
    found = as_http(error)
    return json_response(found.body(), found.status, found.headers())


async def _plain_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the form of the other errors."""
    assert isinstance(error, HTTPException)
    found = HttpError(error.status_code, error.detail)
    headers = dict(error.headers or {})
    if error.status_code == 405:  # the router names the methods of one of the routes of this path only
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        headers["Allow"] = ", ".join(sorted({method for route in matching for method in route.methods or ()}))
    return json_response(found.body(), found.status, headers)
