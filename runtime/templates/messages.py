"""Messages of a conversation, in the form that chat templates expect."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

from ..errors import RequestError
from ..nesting import JSON_DEPTH, depth

# dicts with `role` and `content`, as in OpenAI's chat API
Messages = Sequence[Mapping[str, Any]]


def is_messages(value: object) -> TypeGuard[Messages]:
    """Whether a value is a conversation, and not a text or token ids."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)


def prepared(messages: Messages) -> list[dict[str, Any]]:
    """Prepare every message for a template. RequestError if one is no message."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages: must be a list of at least one message", _HINT, field="messages")
    return [_prepared(message, index) for index, message in enumerate(messages)]


_HINT = 'a message is like {"role": "user", "content": "Hello"}'


def _prepared(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}]: has no role", _HINT, field="messages")
    try:
        return prepared_message(message)
    except (TypeError, KeyError) as error:
        raise RequestError(f"messages[{index}]: {_what(error)}", _HINT, field="messages") from error


def _what(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def prepared_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form that templates expect: texts joined, arguments of tool calls as objects, empty fields left
    out.

    TypeError or KeyError if it does not have the form of a message.
    """
    built: dict[str, Any] = {name: value for name, value in message.items() if value is not None}
    content = built.get("content")
    if isinstance(content, list | tuple):
        built["content"] = "".join(_text(part) for part in content)
    elif content is None and built["role"] == "assistant":
        built["content"] = ""
    elif not isinstance(content, str):
        raise TypeError("content must be a text")
    if "tool_calls" in built:
        built["tool_calls"] = [_call(call) for call in built["tool_calls"]]
    return built


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        raise TypeError('a part of a content must be like {"type": "text", "text": "Hello"}')
    return part["text"]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    return {**call, "function": {**function, "arguments": _arguments(arguments)}}


def _arguments(given: Any) -> Any:
    """The value of arguments that are a JSON text; other arguments unchanged."""
    if not isinstance(given, str):
        return given
    try:
        value = msgspec.json.decode(given)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return given
    if depth(value) > JSON_DEPTH:
        raise RequestError(f"arguments are nested deeper than {JSON_DEPTH}", field="messages")
    return value if not isinstance(value, float) or math.isfinite(value) else given
