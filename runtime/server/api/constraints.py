"""The format of an answer, from all fields that can state one."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ...errors import RequestError
from .errors import conflict
from .formats import (
    GrammarFormat,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    StructuredOutputs,
    TextFormat,
)
from .requests import Common

_FIELDS = ("json", "regex", "choice", "grammar", "json_object")


def format_of(request: Common) -> ResponseFormat | None:
    """The format that a request asks for, by any of its names; None if it asks for none, HttpError if for several."""
    asked: dict[str, tuple[str, Any]] = {}
    for field in ("json", "regex", "choice", "grammar"):
        if (value := getattr(request, f"guided_{field}")) is not None:
            asked[f"guided_{field}"] = (field, value)
    for field, value in _given(request.structured_outputs).items():
        asked[f"structured_outputs.{field}"] = (field, value)
    wanted = None if isinstance(request.response_format, TextFormat) else request.response_format
    names = [*asked, *(["response_format"] if wanted is not None else [])]
    if len(names) > 1:
        raise conflict(f"{' and '.join(names)}: only one of them can be given", names[0])
    return _format(names[0], *asked[names[0]]) if asked else wanted


def _given(outputs: StructuredOutputs | None) -> dict[str, Any]:
    values = {} if outputs is None else {field: getattr(outputs, field) for field in _FIELDS}
    return {field: value for field, value in values.items() if value not in (None, False)}


def _format(name: str, field: str, value: Any) -> ResponseFormat:
    if field == "json_object":
        return JsonObjectFormat()
    if field == "regex":
        return RegexFormat(value)
    if field == "choice":
        return GrammarFormat(f"start: {' | '.join(json.dumps(one, ensure_ascii=False) for one in value)}\n")
    if field == "grammar":
        return GrammarFormat(value)
    return JsonSchemaFormat(JsonSchema("guided", _schema(name, value)))


def _schema(name: str, value: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{name}: is no JSON schema: {error}", field=name) from error
