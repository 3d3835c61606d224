"""Converts a request of /v1/messages to a chat request, so that there is one path to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..decoding import converted
from ..requests import ChatRequest
from .request import (
    AnyChoice,
    AssistantTurn,
    CountTokensRequest,
    MessagesRequest,
    NoChoice,
    SystemTurn,
    TextBlock,
    TextOnly,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)

# fields that both requests have, with the same meaning
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "priority", "deadline", "cache_salt",
    "max_tokens",
)  # fmt: skip


def chat_request(request: CountTokensRequest) -> ChatRequest:
    """The chat request for a request; for a CountTokensRequest, only the fields that give tokens."""
    fields: dict[str, Any] = {"model": request.model, "messages": _messages(request)}
    fields["stream"] = True  # a whole answer is assembled from chunks too
    if isinstance(request.messages[-1], AssistantTurn):  # the answer continues it
        fields["continue_final_message"] = True
    if request.tools:
        fields |= {"tools": [_tool(tool) for tool in request.tools], **_choice(request)}
    if (config := request.output_config) is not None and config.format is not None:
        schema = {"name": "output", "schema": config.format.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    kwargs: dict[str, Any] = {}
    if isinstance(request.thinking, ThinkingEnabled | ThinkingDisabled):
        kwargs["enable_thinking"] = isinstance(request.thinking, ThinkingEnabled)
    if isinstance(request, MessagesRequest):
        fields |= {name: value for name in _SAME if (value := getattr(request, name)) is not None}
        if request.stop_sequences:
            fields["stop"] = request.stop_sequences
        kwargs |= request.chat_template_kwargs or {}
    if kwargs:
        fields["chat_template_kwargs"] = kwargs
    return converted(fields, ChatRequest)


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system)})
    for turn in request.messages:
        if isinstance(turn, SystemTurn):
            messages.append({"role": "system", "content": _text(turn.content)})
        elif isinstance(turn, UserTurn):
            messages += _of_user(turn)
        else:
            messages.append(_of_assistant(turn))
    return messages


def _of_user(turn: UserTurn) -> list[dict[str, Any]]:
    """A message for each tool result, then one for the user's text. The result of a failed tool begins with "Error:
    "."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    messages: list[dict[str, Any]] = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            said = _text(block.content or "")
            said = f"Error: {said}" if block.is_error else said
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": said})
    texts = [block for block in turn.content if isinstance(block, TextBlock)]
    if texts or not messages:
        messages.append({"role": "user", "content": _text(texts)})
    return messages


def _of_assistant(turn: AssistantTurn) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = _text([block for block in turn.content if isinstance(block, TextBlock)])
    if thoughts := [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = "".join(thoughts)
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": _json(block.input)}}
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _text(content: str | Sequence[TextBlock | TextOnly]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _tool(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(request: CountTokensRequest) -> dict[str, Any]:
    """The fields for which tool may or must be called, and whether several may be."""
    choice = request.tool_choice
    if choice is None:
        return {}
    fields: dict[str, Any] = {"tool_choice": "auto"}
    if isinstance(choice, ToolChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif isinstance(choice, AnyChoice | NoChoice):
        fields["tool_choice"] = "required" if isinstance(choice, AnyChoice) else "none"
    if not isinstance(choice, NoChoice) and choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields
