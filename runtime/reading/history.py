"""Adapts a conversation to a model's chat template, by the format that was found from the template."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import RequestError
from ..nesting import JSON_DEPTH, depth
from .formats import AnswerFormat


def fitted(messages: Sequence[dict[str, Any]], form: AnswerFormat) -> list[dict[str, Any]]:
    """Messages in the form that templates expect: texts joined, arguments of calls as objects, empty fields left out.
    Also as this template requires: with ids that it accepts, one call per message if it supports no more, and without
    roles that it drops. The given messages may be modified."""
    built = [_message(message, form) for message in messages]
    _fit_ids(built, form)
    if form.calls is not None and not form.calls.parallel:
        built = _one_call_each(built)
    return built


def _message(given: dict[str, Any], form: AnswerFormat) -> dict[str, Any]:
    built: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if isinstance(content := built.get("content"), list):
        built["content"] = "".join(part.get("text") or part.get("refusal") or "" for part in content)
    if built["role"] == "developer" and not form.developer:
        built["role"] = "system"
    if built["role"] == "function":
        built = {"content": "", **built, "role": "tool", "tool_call_id": built["name"]}
    if built["role"] == "assistant":
        built = _assistant(built, form)
    return built


def _assistant(built: dict[str, Any], form: AnswerFormat) -> dict[str, Any]:
    if not built.get("content"):
        built["content"] = built.pop("refusal", "")
    thought = built.get("reasoning_content") or built.get("thinking") or built.get("reasoning")
    if thought:  # templates use different names for it
        built |= {"reasoning_content": thought, "reasoning": thought, "thinking": thought}
    if (called := built.pop("function_call", None)) is not None and not built.get("tool_calls"):
        built["tool_calls"] = [{"id": called["name"], "function": called}]
    if not built.get("tool_calls"):
        built.pop("tool_calls", None)
    for call in built.get("tool_calls", ()):
        call["type"] = "function"
        call["id"] = call.get("id") or ""
        call["function"]["arguments"] = _arguments(call["function"].get("arguments"), form)
    return built


def _arguments(given: str | dict[str, Any] | None, form: AnswerFormat) -> Any:
    """Arguments as the template expects them: a value if they are JSON, else the text itself."""
    if given is None or (isinstance(given, str) and not given.strip()):
        given = "{}"
    value = _read(given) if isinstance(given, str) else given
    if depth(value) > JSON_DEPTH:
        raise RequestError(f"arguments are nested deeper than {JSON_DEPTH}", field="messages")
    if form.arguments_as_text:
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return value


def _read(text: str) -> Any:
    """The value of a JSON text, of which every string and number can be written again; the text itself if it is not
    JSON."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=str)
        msgspec.json.encode(value)
    except (ValueError, RecursionError, msgspec.EncodeError, OverflowError):
        return text
    return value


def _finite(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


def _fit_ids(messages: list[dict[str, Any]], form: AnswerFormat) -> None:
    """Replace ids of calls by ones that the template accepts, the same in a call and in its result."""
    known: dict[str, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            given = call["id"]
            call["id"] = known[given] = _fitting(given, call["function"]["name"], number, form)
            number += 1
        if message["role"] == "tool":
            given = message.get("tool_call_id", "")
            message["tool_call_id"] = known.get(given) or _fitting(given, message.get("name") or given, 0, form)


def _fitting(given: str, name: str, number: int, form: AnswerFormat) -> str:
    if form.ids == "named":
        return f"functions.{name}:{number}"
    if form.ids == "short" and not (len(given) == 9 and given.isalnum() and given.isascii()):
        return hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]
    return given


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split a message with several calls into messages with one call, each followed by its result."""
    apart: list[dict[str, Any]] = []
    results = [message for message in messages if message["role"] == "tool"]
    moved: set[int] = set()
    for message in messages:
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            apart += [] if id(message) in moved else [message]
            continue
        for index, call in enumerate(calls):
            apart.append({**message, "content": message["content"] if not index else "", "tool_calls": [call]})
            answers = [one for one in results if one["tool_call_id"] == call["id"] and id(one) not in moved]
            moved |= {id(one) for one in answers}
            apart += answers
    return apart
