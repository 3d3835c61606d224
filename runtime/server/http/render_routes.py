"""The routes that render: the token ids of a request, which is not run, for routers that look up cached prefixes."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..api.jobs import Job
from ..api.requests import ChatRequest, Common, CompletionRequest
from ..api.responses import Rendered, RenderedSampling
from .bodies import decode_body, json_response
from .openapi import operation
from .parts import ServerParts

_ERRORS = (400, 404, 408, 413)


def add_render(app: FastAPI, parts: ServerParts) -> None:
    """Add /v1/completions/render and /v1/chat/completions/render, in vLLM's form."""

    @app.post("/v1/completions/render", **operation(list[Rendered], CompletionRequest, errors=_ERRORS))
    async def render_completions(request: Request) -> Response:
        """The token ids of each prompt of a completion, which is not run."""
        body = await decode_body(request, CompletionRequest)
        parts.jobs.check_model(body.model)
        job = await parts.jobs.completion(body, request.scope["icc.client"])
        return json_response(_rendered(parts, body, job, "cmpl"))

    @app.post("/v1/chat/completions/render", **operation(Rendered, ChatRequest, errors=_ERRORS))
    async def render_chat(request: Request) -> Response:
        """The token ids of a conversation in the model's template, which is not answered."""
        body = await decode_body(request, ChatRequest)
        parts.jobs.check_model(body.model)
        job = await parts.jobs.chat(body, request.scope["icc.client"])
        return json_response(_rendered(parts, body, job, "chatcmpl")[0])


def _rendered(parts: ServerParts, body: Common, job: Job, kind: str) -> list[Rendered]:
    """The rendered prompts of a job, one for each."""
    params, name = job.submits[0].params, f"{kind}-{uuid.uuid4().hex}"
    fields = {field: getattr(params, field) for field in RenderedSampling.__struct_fields__}
    found = RenderedSampling(**fields | {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)})
    return [
        Rendered(
            name if len(job.submits) == 1 else f"{name}-{number}",
            body.model or parts.model.name,
            list(submit.prompt),
            found,
            bool(body.stream),
            submit.priority,
            body.cache_salt,
        )
        for number, submit in enumerate(job.submits)
    ]
