"""response_format as a grammar in llguidance's own format."""

from __future__ import annotations

import json
from typing import Any

import llguidance

from ...errors import RequestError
from . import limits
from .requests import GrammarFormat, JsonObjectFormat, JsonSchemaFormat, RegexFormat, ResponseFormat

_WHITE_SPACE = {"whitespace_flexible": False}  # one way to write a value: shorter, and it cannot end in endless blanks


def of_format(wanted: ResponseFormat | None) -> str:
    """The grammar, "" for any text. RequestError if a schema is nested too deep or too large."""
    if isinstance(wanted, JsonObjectFormat):
        return of_schema({"type": "object"})
    if isinstance(wanted, JsonSchemaFormat):
        return of_schema(wanted.json_schema.schema)
    if isinstance(wanted, RegexFormat):
        return llguidance.LLMatcher.grammar_from_regex(wanted.regex)
    if isinstance(wanted, GrammarFormat):
        return of_lark(wanted.grammar)
    return ""


def of_schema(schema: dict[str, Any]) -> str:
    return _grammar({"json_schema": checked({**schema, "x-guidance": _WHITE_SPACE})})


def of_lark(lark: str) -> str:
    """A grammar in Lark's EBNF, with llguidance's additions such as `%json {...}`."""
    return _grammar({"lark_grammar": lark})


def checked(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema. RequestError if it is nested deeper or is larger than the limits."""
    if limits.depth(schema) > limits.JSON_DEPTH:
        raise RequestError(f"the schema is nested deeper than {limits.JSON_DEPTH}", field="response_format")
    if len(json.dumps(schema)) > 4 * limits.GRAMMAR_CHARS:
        raise RequestError(f"the schema is larger than {4 * limits.GRAMMAR_CHARS} bytes", field="response_format")
    return schema


def _grammar(part: dict[str, object]) -> str:
    return json.dumps({"grammars": [part]})
