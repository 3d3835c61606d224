"""The OpenAPI document: made from the types that requests are decoded by and answers are encoded from."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, get_args, get_origin

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ...embed_prompts import prompt_names
from ..api.fields import INPUT_SCHEMA, PROMPT_SCHEMA
from ..api.model import ServedModel
from ..api.requests import OTHERS
from ..api.responses import ErrorBody

_ANSWERED = (
    "CompletionRequest", "ChatRequest", "EmbeddingRequest", "RerankRequest", "ResponsesRequest", "CompactRequest",
    "MessagesRequest",
    "CountTokensRequest", "OllamaChatRequest", "OllamaGenerateRequest", "OllamaEmbedRequest", "OllamaEmbeddingsRequest",
    "OllamaShowRequest", "DecisionRequest",
)  # fmt: skip
REQUESTS = (*_ANSWERED, "TokenizeRequest", "DetokenizeRequest")
_REFS = "#/components/schemas/{name}"
_ERRORS = {
    400: "A field of the request is wrong.",
    401: "No API key, or a wrong one.",
    403: "The server has no API keys, and this needs one.",
    404: "What the request names does not exist.",
    409: "The engine in the directory is another.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    429: "The queue is full: Retry-After says when to try again; without it, the request is too large.",
    500: "The server failed on this request.",
    503: "The engine is not ready, or the server is shutting down.",
    504: "The request's deadline has passed.",
}
_types: dict[str, type] = {ErrorBody.__name__: ErrorBody}


def operation(
    answer: type | None,
    body: type | None = None,
    errors: tuple[int, ...] = (),
    events: bool = False,
    form: dict[str, Any] | None = None,
    error_body: type = ErrorBody,
    lines: bool = False,
) -> dict[str, Any]:
    """The arguments of a route that document it: its body (None: none), its answer (None: plain text), the statuses of
    its errors, whether the answer can be a stream of events, the schema of a form as its body (None: no form), the type
    of its errors, and whether the answer can be a stream of lines."""
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if answer is not None:
        item = get_args(answer)[0] if get_origin(answer) is list else answer
        schema = _ref(item) if item is answer else {"type": "array", "items": _ref(item)}
        content, answer = {"application/json": {"schema": schema}}, item
    if events:
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    if lines:
        content["application/x-ndjson"] = {"schema": {}}
    responses: dict[int, Any] = {
        200: {"description": (answer.__doc__ if answer else None) or "The answer.", "content": content}
    }
    for status in (401, *errors):
        responses[status] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": _ref(error_body)}},
        }
    extra = {}
    if body is not None:
        extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}}}
    if form is not None:
        extra = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}
    return {"responses": responses, "openapi_extra": extra, "response_model": None}


def document(app: FastAPI, model: ServedModel) -> dict[str, Any]:
    """The document, with the bounds of this engine, such as its names and its vocabulary."""
    if app.openapi_schema is None:
        found = get_openapi(title="icc", version=app.version, routes=app.routes)
        schemas = msgspec.json.schema_components(_types.values(), ref_template=_REFS)[1]
        _fit(schemas, model)
        found["components"] = {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        }
        found["security"] = [{"key": []}]
        for path in ("/live", "/ready"):
            found["paths"][path]["get"]["security"] = []
        for methods in found["paths"].values():
            for described in methods.values():
                described["responses"].pop("422", None)  # added by FastAPI; this API answers 400
        app.openapi_schema = found
    return app.openapi_schema


def _fit(schemas: dict[str, Any], model: ServedModel) -> None:
    """Set the bounds of this engine."""
    for name in _ANSWERED:
        if name in schemas:
            schemas[name]["properties"]["model"]["enum"] = ["", *model.names]
    for name in ("CompletionRequest", "OllamaGenerateRequest"):
        if name in schemas and not model.fills:
            schemas[name]["properties"]["suffix"] = {"enum": ["", None]}
    _pass_what_says_nothing(schemas)
    for name, field, prompt in (
        ("CompletionRequest", "prompt", PROMPT_SCHEMA),
        ("EmbeddingRequest", "input", INPUT_SCHEMA),
    ):
        if name in schemas:  # an empty prompt is refused, unless the tokenizer adds a bos token
            empty = model.manifest.model.bos_token_id is not None
            schemas[name]["properties"][field] = deepcopy(prompt) if empty else _not_empty(prompt)
    _fit_vectors(schemas, model)
    if "ChatRequest" in schemas:
        schemas["ChatRequest"]["properties"]["chat_template"] = {"enum": [*model.template.names, None]}
    for name in ("TokenizeRequest", "DetokenizeRequest"):
        schemas[name]["properties"]["model"] = {"enum": [*model.names, None]}
    schemas["TokenizeRequest"]["oneOf"] = [
        {"required": [field], "properties": {field: {"not": {"type": "null"}}}} for field in ("prompt", "messages")
    ]
    if "OllamaOptions" in schemas:
        _at_most(schemas["OllamaOptions"]["properties"]["num_ctx"], model.max_len)
    for name in ("InputMessage", "DecisionMessage"):  # see ResponsesRequest.prepare
        if name in schemas:
            schemas[name]["required"].remove("type")
    _bound_tokens(schemas, model.vocab_size - 1)


def _fit_vectors(schemas: dict[str, Any], model: ServedModel) -> None:
    if model.manifest.embedding is not None and "EmbeddingRequest" in schemas:
        fields = schemas["EmbeddingRequest"]["properties"]
        _at_most(fields["dimensions"], model.manifest.embedding.dimension)
        for field in ("prompt_name", "input_type", "task"):
            fields[field] = {"enum": [*prompt_names(model.manifest), None]}


def _pass_what_says_nothing(schemas: dict[str, Any]) -> None:
    """Allow null for every optional field at the top level of a request, and the defaults of other servers' fields."""
    for name in REQUESTS:
        if name not in schemas:
            continue
        schema = schemas[name]
        for field, described in schema["properties"].items():
            nullable = {"type": "null"} in described.get("anyOf", ()) or None in described.get("enum", ())
            if field not in schema.get("required", ()) and not nullable:
                default = {"default": described.pop("default")} if "default" in described else {}
                schema["properties"][field] = {"anyOf": [described, {"type": "null"}], **default}
        for field, value in OTHERS.items():
            schema["properties"].setdefault(field, {"enum": [value, None]})
        schema["additionalProperties"] = {"type": "null"}


def _at_most(schema: dict[str, Any], largest: int) -> None:
    for part in (schema, *schema.get("anyOf", ())):
        if part.get("type") == "integer":
            part["maximum"] = largest


def _not_empty(schema: Any) -> Any:
    """The schema with a minimum length of one character for texts."""
    if isinstance(schema, list):
        return [_not_empty(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    least = {"minLength": 1} if schema.get("type") == "string" else {}
    return {name: _not_empty(part) for name, part in schema.items()} | least


def _ref(kind: type) -> dict[str, str]:
    _types[kind.__name__] = kind
    return {"$ref": _REFS.format(name=kind.__name__)}


def _bound_tokens(schema: Any, largest: int) -> None:
    if isinstance(schema, dict):
        if schema.pop("x-token", False):
            schema["maximum"] = largest
        for part in schema.values():
            _bound_tokens(part, largest)
    elif isinstance(schema, list):
        for part in schema:
            _bound_tokens(part, largest)
