"""The FastAPI application: routes, and nothing else."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from .... import __version__
from ...errors import IccError
from ...format.manifest import EmbeddingFacts
from ..api import tei
from ..api.answers import ChatAnswer, CompletionAnswer
from ..api.decoding import decoded
from ..api.embeddings import embedding_answer
from ..api.errors import ClientGone, HttpError, as_http
from ..api.requests import ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest
from ..api.reranking import rerank_answer
from ..api.responses import (
    ChatCompletion,
    CompletionResponse,
    EmbeddingList,
    Model,
    ModelList,
    Reranked,
    Status,
    Version,
)
from .adapter_routes import add_adapters
from .batch_routes import add_batches
from .bodies import decode_body, error_response, json_response, read_body
from .change_routes import add_changes
from .decision_routes import add_decisions
from .docs_page import add_docs
from .kv_routes import add_kv
from .messages_routes import add_messages
from .ollama_routes import add_ollama
from .openapi import document, operation
from .page_routes import add_page
from .parts import GENERATION_ERRORS, ServerParts
from .render_routes import add_render
from .responses_routes import add_responses
from .token_routes import add_tokens


def build_app(parts: ServerParts) -> FastAPI:
    """The application with all routes over the parts. The caller wraps it in a ClientGate."""
    app = FastAPI(title="icc", version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.openapi = lambda: document(app, parts.model)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _plain_error)
    for kind in (IccError, ClientGone, Exception):  # an Exception passes on to the gate, which logs it
        app.add_exception_handler(kind, _error)
    _add_state(app, parts)
    _add_models(app, parts)
    if parts.model.task == "embed":
        _add_embeddings(app, parts)
    elif parts.model.task == "rerank":
        _add_reranking(app, parts)
    else:
        _add_generation(app, parts)
        add_render(app, parts)
        add_kv(app, parts.engine.gifts, parts.nixl)
        add_responses(app, parts)
        add_messages(app, parts)
        add_decisions(app, parts)
    add_ollama(app, parts)
    _refuse_others(app, parts)
    add_adapters(app, parts.adapters)
    add_changes(app, parts.changes)
    add_tokens(app, parts)
    add_page(app, parts.model, parts.changes, parts.engine, parts.metrics)
    if parts.batches is not None:
        add_batches(app, parts.batches)
    add_docs(app, app.openapi())  # the document is made now, not during the first request
    return app


def _add_state(app: FastAPI, parts: ServerParts) -> None:
    @app.get("/live", **operation(Status))
    async def live() -> Response:
        """Whether the server answers at all."""
        return json_response(Status("live"))

    @app.get("/health", **operation(Status, errors=(503,)))  # requested by GuideLLM and others, with their key
    @app.get("/ready", **operation(Status, errors=(503,)))
    async def ready() -> Response:
        """Whether the engine is loaded and can take requests."""
        if not parts.engine.ready:
            raise HttpError(503, "the engine is not ready", code="not_ready", retry_after=1)
        return json_response(Status("ready"))

    @app.get("/version", **operation(Version))
    async def show_version() -> Response:
        """The served model, and the version of icc."""
        manifest = parts.changes.manifest
        found = Version(__version__, parts.model.name, manifest.target, manifest.quantization.method)
        return json_response(found)

    @app.get("/metrics", **operation(None))
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(parts.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_models(app: FastAPI, parts: ServerParts) -> None:
    def entry(name: str) -> Model:
        own = next((adapter for adapter in parts.adapters.all if adapter.name == name), None)
        if own is None:
            return Model(name, parts.model.created, parts.model.max_len)
        return Model(name, own.created, parts.model.max_len, parent=parts.model.name, root=str(own.path))

    @app.get("/v1/models", **operation(ModelList))
    async def models() -> Response:
        """The served model, listed once under each of its names, and the loaded adapters."""
        adapters = [adapter.name for adapter in parts.adapters.all]
        return json_response(ModelList([entry(name) for name in (*parts.model.names, *adapters)]))

    @app.get("/v1/models/{model:path}", **operation(Model, errors=(404,)))
    async def one_model(model: str) -> Response:
        """The model of that name."""
        parts.jobs.check_model(model)
        return json_response(entry(model))


def _add_generation(app: FastAPI, parts: ServerParts) -> None:
    @app.post(
        "/v1/completions", **operation(CompletionResponse, CompletionRequest, errors=GENERATION_ERRORS, events=True)
    )
    async def completions(request: Request) -> Response:
        """Complete one or several prompts."""
        body = await parts.read(request, CompletionRequest)
        job = await parts.jobs.completion(body, request.scope["icc.client"])
        job = await parts.prefillers.completion(request, body, job)
        make = partial(CompletionAnswer, parts.model, body, job)
        return await parts.answer(request, job, make, body.stream)

    @app.post("/v1/chat/completions", **operation(ChatCompletion, ChatRequest, errors=GENERATION_ERRORS, events=True))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = await parts.read(request, ChatRequest)
        job = await parts.prefillers.chat(request, body, await parts.jobs.chat(body, request.scope["icc.client"]))
        return await parts.answer(request, job, partial(ChatAnswer, parts.model, body, job), body.stream)


def _add_embeddings(app: FastAPI, parts: ServerParts) -> None:
    @app.post("/v1/embeddings", **operation(EmbeddingList, EmbeddingRequest, errors=(*GENERATION_ERRORS, 504)))
    async def embeddings(request: Request) -> Response:
        """The vector of each text."""
        body = await parts.read(request, EmbeddingRequest)
        job = await parts.jobs.embedding(body, request.scope["icc.client"])
        return await parts.encoded(request, embedding_answer(parts.generator, job, body))

    @app.post("/embed", include_in_schema=False)
    async def embed(request: Request) -> Response:
        """The vector of each text, for clients of text-embeddings-inference."""
        body = await decode_body(request, tei.EmbedRequest)
        job = await parts.jobs.embedding(body.plain(parts.model.names[0]), request.scope["icc.client"])
        return await parts.encoded(request, tei.vectors_answer(parts.generator, job, body, _facts(parts)))


def _add_reranking(app: FastAPI, parts: ServerParts) -> None:
    @app.post("/rerank", include_in_schema=False)
    async def either(request: Request) -> Response:
        """As /v1/rerank, or as in text-embeddings-inference if the body has `texts`."""
        raw = await read_body(request)
        if not tei.has_texts(raw):
            return await ranked(request, parts.jobs.named(decoded(raw, RerankRequest)))
        body = decoded(raw, tei.TextsRequest)
        job = await parts.jobs.rerank(body.plain(parts.model.names[0]), request.scope["icc.client"])
        return await parts.encoded(request, tei.ranks_answer(parts.generator, job, body, _facts(parts)))

    @app.post("/v2/rerank", include_in_schema=False)
    @app.post("/v1/rerank", **operation(Reranked, RerankRequest, errors=(*GENERATION_ERRORS, 504)))
    async def rerank(request: Request) -> Response:
        """The documents, ranked by their relevance to the query."""
        return await ranked(request, await parts.read(request, RerankRequest))

    async def ranked(request: Request, body: RerankRequest) -> Response:
        job = await parts.jobs.rerank(body, request.scope["icc.client"])
        return await parts.encoded(request, rerank_answer(parts.generator, job, body, _facts(parts)))


def _facts(parts: ServerParts) -> EmbeddingFacts:
    facts = parts.model.manifest.embedding
    assert facts is not None
    return facts


_PATHS = {
    "generate": (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/decisions",
        "/api/chat",
        "/api/generate",
    ),
    "embed": ("/v1/embeddings", "/embed", "/api/embed", "/api/embeddings"),
    "rerank": ("/v1/rerank", "/rerank", "/v2/rerank"),
}


def _refuse_others(app: FastAPI, parts: ServerParts) -> None:
    """Routes for tasks that the engine was not compiled for, so that the answer says that instead of "not found"."""

    def add(path: str, task: str) -> None:
        async def refuse() -> None:
            parts.model.check_task(task)

        app.add_api_route(path, refuse, methods=["POST"], include_in_schema=False)

    for task, paths in _PATHS.items():
        for path in paths if task != parts.model.task else ():
            add(path, task)


async def _error(request: Request, error: Exception) -> Response:
    return error_response(request.scope, as_http(error))


async def _plain_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the form of the other errors."""
    assert isinstance(error, HTTPException)
    found = HttpError(error.status_code, error.detail)
    headers = dict(error.headers or {})
    if error.status_code == 405:  # the router lists the methods of only one of this path's routes
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        headers["Allow"] = ", ".join(sorted({method for route in matching for method in route.methods or ()}))
    return error_response(request.scope, found, headers)
