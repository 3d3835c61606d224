"""Converts requests of Ollama's API to requests of OpenAI's, so that there is one path to the engine."""

from __future__ import annotations

from typing import Any

from ....requests.params import BOUNDS
from ..decoding import converted
from ..errors import HttpError, conflict
from ..model import ServedModel
from ..requests import ChatRequest, CompletionRequest, EmbeddingRequest
from .request import (
    OllamaAsking,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)

# options that a request of this server has too, with the same meaning
_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_MOST = int(BOUNDS["max_tokens"][1])


def chat_request(request: OllamaChatRequest, model: ServedModel) -> ChatRequest:
    """The chat request of a conversation. HttpError for an option that this server lacks."""
    messages = request.messages or []
    fields = _chat_fields(request, model, _messages(messages))
    if messages and messages[-1].role == "assistant":  # the answer continues it
        fields["continue_final_message"] = True
    if request.tools:
        fields["tools"] = request.tools
    return converted(fields, ChatRequest)


def prompt_request(request: OllamaGenerateRequest, model: ServedModel) -> ChatRequest | CompletionRequest:
    """The request of a prompt: a user message if the model has a chat template, or a text to complete. HttpError for an
    option that this server lacks."""
    _refuse_images(request.images, "images")
    if request.template:
        raise conflict("template: conversations are written in the model's own template", "template")
    if request.context:
        raise conflict("context: send the earlier conversation as messages of /api/chat", "context")
    prompt = request.prompt or ""
    if request.raw or request.suffix or not model.template:
        if request.system:
            raise conflict("system: for prompts that are not completed as they are", "system")
        if request.think:
            raise conflict("think: for prompts that are not completed as they are", "think")
        fields = {**_fields(request, model), "prompt": prompt, "suffix": request.suffix}
        fields["max_tokens"] = fields.get("max_tokens", _MOST)
        if request.logprobs or request.top_logprobs:
            fields["logprobs"] = request.top_logprobs or 0
        return converted(fields, CompletionRequest)
    said = [{"role": "user", "content": prompt}]
    if request.system:
        said = [{"role": "system", "content": request.system}, *said]
    return converted(_chat_fields(request, model, said), ChatRequest)


def embedding_request(request: OllamaEmbedRequest | OllamaEmbeddingsRequest, model: ServedModel) -> EmbeddingRequest:
    """The request for vectors."""
    check_context(request.options, model)
    if isinstance(request, OllamaEmbeddingsRequest):
        return EmbeddingRequest(model=request.model, input=request.prompt, truncate=True)
    cut = request.truncate is not False
    return EmbeddingRequest(model=request.model, input=request.input, dimensions=request.dimensions, truncate=cut)  # type: ignore[arg-type]


def _chat_fields(request: OllamaAsking, model: ServedModel, messages: list[dict[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {**_fields(request, model), "messages": messages}
    if request.logprobs or request.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.think is not None:
        form = model.prompting.form
        if request.think and form.thinking is None and not form.messages:
            raise conflict(f"think: {request.model!r} does not support thinking", "think")
        fields["chat_template_kwargs"] = {"enable_thinking": request.think is not False}
        if isinstance(request.think, str):
            fields["reasoning_effort"] = request.think
    return fields


def _fields(request: OllamaAsking, model: ServedModel) -> dict[str, Any]:
    """Fields that chats and completions share. If neither the request nor the model says how to sample, Ollama's values
    are used."""
    if request.truncate:
        raise conflict("truncate: prompts that are too long are refused", "truncate")
    if request.shift:
        raise conflict("shift: an answer ends at the end of the context", "shift")
    options = request.options or OllamaOptions()
    check_context(options, model)
    defaults = model.manifest.sampling.of_terminals()
    given = {name: value for name in _SAME if (value := getattr(options, name)) is not None}
    fields: dict[str, Any] = {"model": request.model, "stream": True}  # whole answers are assembled from chunks too
    fields |= {name: value for name in _SAME[:4] if (value := getattr(defaults, name)) is not None} | given
    if options.num_predict is not None and options.num_predict > 0:
        fields["max_tokens"] = options.num_predict
    if (penalty := _repetition_penalty(options)) is not None:
        fields["repetition_penalty"] = penalty
    if request.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif request.format:
        schema = {"name": "format", "schema": request.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def check_context(options: OllamaOptions | None, model: ServedModel) -> None:
    """HttpError 400 if options ask for more tokens of context than the engine was compiled for. options: None asks for
    none."""
    wanted = None if options is None else options.num_ctx
    if wanted is not None and wanted > model.max_len:
        raise HttpError(
            400,
            f"options.num_ctx: the engine was compiled for {model.max_len} tokens of context, not {wanted}",
            "options.num_ctx",
            "invalid_value",
        )


def _repetition_penalty(options: OllamaOptions) -> float | None:
    if options.repeat_last_n == 0:
        return 1.0
    if options.repeat_penalty not in (None, 1.0) and options.repeat_last_n not in (None, -1):
        raise conflict(
            "options.repeat_last_n: repeat_penalty acts on all tokens here: give -1", "options.repeat_last_n"
        )
    return options.repeat_penalty


def _messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """The messages, with ids for calls and results that have none."""
    found: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # (id, name) of calls without a result so far
    count = 0
    for place, message in enumerate(messages):
        _refuse_images(message.images, f"messages[{place}].images")
        built: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.role == "assistant":
            if message.thinking:
                built["reasoning_content"] = message.thinking
            calls = []
            for call in message.tool_calls or ():
                name = call.id or f"call_{count}"
                count += 1
                function = {"name": call.function.name, "arguments": call.function.arguments or {}}
                calls.append({"id": name, "type": "function", "function": function})
                open_calls.append((name, call.function.name))
            built |= {"tool_calls": calls} if calls else {}
        elif message.role == "tool":
            built["tool_call_id"] = _answered(message, open_calls)
            built |= {"name": message.tool_name} if message.tool_name else {}
        found.append(built)
    return found


def _answered(message: OllamaMessage, open_calls: list[tuple[str, str]]) -> str:
    """The id of the call that a result belongs to; the call is removed from the open ones."""
    for call in open_calls:
        if message.tool_call_id == call[0] or (message.tool_call_id is None and message.tool_name in (None, call[1])):
            open_calls.remove(call)
            return call[0]
    return message.tool_call_id or message.tool_name or "call_0"


def _refuse_images(images: list[str] | None, field: str) -> None:
    if images:
        raise HttpError(400, f"{field}: this model reads text, and takes no image", field, "unsupported_content")
