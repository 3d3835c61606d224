"""Converts a request of /v1/responses to a chat request, so that there is one path to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..decoding import converted
from ..errors import HttpError
from ..requests import ChatRequest
from .request import (
    CompactionItem,
    FunctionCallItem,
    FunctionCallOutput,
    FunctionChoice,
    FunctionTool,
    InputMessage,
    Item,
    JsonObject,
    ReasoningItem,
    ResponseAllowedTools,
    ResponseJsonSchema,
    ResponsesRequest,
    summary_of,
    text_of,
)

# fields that both requests have, with the same meaning
_SAME = (
    "model", "temperature", "top_p", "presence_penalty", "frequency_penalty", "parallel_tool_calls", "seed", "stop",
    "top_k", "min_p", "repetition_penalty", "priority", "deadline", "cache_salt", "chat_template_kwargs", "user",
    "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"


def items_of(request: ResponsesRequest) -> list[Item]:
    """The input as items; a text becomes a user message."""
    return [InputMessage("user", request.input)] if isinstance(request.input, str) else list(request.input)


def chat_request(request: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    """The chat request of all items of the conversation. HttpError 400 for a feature that this server lacks."""
    if request.background:
        raise HttpError(400, "this server does not run responses in the background", "background", "unsupported")
    fields: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    fields["messages"] = messages_of(request.instructions, items)
    fields["stream"] = True  # a whole answer is assembled from chunks too
    if request.max_output_tokens is not None:
        fields["max_completion_tokens"] = request.max_output_tokens
    if request.top_logprobs is not None or _LOGPROBS in (request.include or ()):
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.reasoning is not None and request.reasoning.effort is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if (wanted := _response_format(request)) is not None:
        fields["response_format"] = wanted
    if request.tools:
        fields["tools"] = [{"type": "function", "function": _function(tool)} for tool in request.tools]
    if request.tool_choice is not None:
        fields["tool_choice"] = _choice(request)
    return converted(fields, ChatRequest)


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """A conversation as chat messages. instructions: its system message, None for none. Consecutive thoughts, text and
    calls of the model are one message."""
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in items:
        if isinstance(item, CompactionItem):
            _add_summary(messages, summary_of(item))
        elif isinstance(item, InputMessage) and item.role != "assistant":
            messages.append({"role": item.role, "content": text_of(item.content)})
        elif isinstance(item, FunctionCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        else:
            _add_turn(messages, item)
    return messages


def _add_summary(messages: list[dict[str, Any]], summary: str) -> None:
    """Append the summary to the system message: templates accept a single one, at the beginning."""
    if messages and messages[-1]["role"] in ("system", "developer"):
        messages[-1]["content"] += f"\n\n{summary}"
    else:
        messages.append({"role": "system", "content": summary})


def _add_turn(messages: list[dict[str, Any]], item: Item) -> None:
    """Add an item to the assistant's message at the end. Thoughts, and a second text, begin a new message."""
    last: dict[str, Any] | None = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is None or isinstance(item, ReasoningItem) or (isinstance(item, InputMessage) and "content" in last):
        last = {"role": "assistant"}
        messages.append(last)
    if isinstance(item, ReasoningItem):
        last["reasoning_content"] = "".join(part.text for part in item.content or item.summary)
    elif isinstance(item, InputMessage):
        last["content"] = text_of(item.content)
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _choice(request: ResponsesRequest) -> Any:
    """The tool_choice of a chat request."""
    choice = request.tool_choice
    if isinstance(choice, FunctionChoice):
        return _named(choice.name)
    if isinstance(choice, ResponseAllowedTools):
        allowed = {"mode": choice.mode, "tools": [_named(tool.name) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _function(tool: FunctionTool) -> dict[str, Any]:
    return {name: value for name in ("name", "description", "parameters") if (value := getattr(tool, name)) is not None}


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    wanted = request.text.format if request.text is not None else None
    if isinstance(wanted, ResponseJsonSchema):
        schema = {"name": wanted.name, "schema": wanted.schema, "strict": wanted.strict}
        return {"type": "json_schema", "json_schema": schema}
    return {"type": "json_object"} if isinstance(wanted, JsonObject) else None
