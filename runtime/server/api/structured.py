"""response_format as a grammar in llguidance's own format."""

from __future__ import annotations

import json
from typing import Any

import llguidance

from ...errors import RequestError
from . import limits
from .formats import GrammarFormat, JsonObjectFormat, JsonSchemaFormat, RegexFormat, ResponseFormat

_WHITE_SPACE = {"whitespace_flexible": False}  # one way to write a value: shorter, and it cannot end in endless blanks


def of_format(wanted: ResponseFormat | None) -> str:
    """The grammar, "" for any text. RequestError if a schema is nested too deep or too large."""
    if isinstance(wanted, JsonObjectFormat):
        return of_schema({"type": "object"} if wanted.schema is None else wanted.schema)
    if isinstance(wanted, JsonSchemaFormat):
        return of_schema(wanted.json_schema.schema or {})
    if isinstance(wanted, RegexFormat):
        return llguidance.LLMatcher.grammar_from_regex(wanted.regex)
    if isinstance(wanted, GrammarFormat):
        return of_lark(wanted.grammar)
    return ""


def of_schema(schema: dict[str, Any] | bool) -> str:
    schema = ({} if schema else {"not": {}}) if isinstance(schema, bool) else schema
    return _grammar({"json_schema": checked({**schema, "x-guidance": _WHITE_SPACE})})


def of_lark(lark: str, schemas: dict[str, Any] | None = None) -> str:
    """A grammar in Lark's EBNF, with further rules that are JSON values which schemas allow."""
    rules = [
        f"{name}: %json {json.dumps({**checked(schema), 'x-guidance': _WHITE_SPACE})}\n"
        for name, schema in (schemas or {}).items()
    ]
    return _grammar({"lark_grammar": "".join([lark, *rules])})


def checked(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema. RequestError if it is nested deeper or is larger than the limits."""
    if limits.depth(schema) > limits.JSON_DEPTH:
        raise RequestError(f"the schema is nested deeper than {limits.JSON_DEPTH}", field="response_format")
    if len(json.dumps(schema)) > 4 * limits.GRAMMAR_CHARS:
        raise RequestError(f"the schema is larger than {4 * limits.GRAMMAR_CHARS} bytes", field="response_format")
    return schema


def _grammar(part: dict[str, object]) -> str:
    return json.dumps({"grammars": [part]})
