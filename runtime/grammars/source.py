"""Grammars in llguidance's own format, of schemas, regular expressions and EBNF."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import llguidance

from ..errors import RequestError
from ..nesting import JSON_DEPTH, depth
from ..requests.params import SamplingParams

MAX_SCHEMA_BYTES = 64 << 10
_WHITE_SPACE = {"whitespace_flexible": False}  # one way to write a value: shorter, and it cannot end in endless blanks


def of_params(params: SamplingParams) -> str:
    """What the parameters of a request say that its text must be; "" for any text."""
    if params.json_schema is not None:
        assert isinstance(params.json_schema, Mapping)  # a text was read when the parameters were made
        return of_schema(params.json_schema)
    if params.regex is not None:
        return of_regex(params.regex)
    return "" if params.grammar is None else of_lark(params.grammar)


def of_schema(schema: Mapping[str, Any]) -> str:
    """A JSON value that a schema allows. RequestError if it is nested too deep or too large."""
    return _grammar({"json_schema": checked({**schema, "x-guidance": _WHITE_SPACE})})


def of_regex(regex: str) -> str:
    """A text that a regular expression, in the syntax of Rust's `regex` crate, matches as a whole."""
    return llguidance.LLMatcher.grammar_from_regex(regex)


def of_lark(lark: str) -> str:
    """A grammar in Lark's EBNF, with llguidance's additions such as `%json {...}`."""
    return _grammar({"lark_grammar": lark})


def checked(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema. RequestError if it is nested deeper or is larger than the limits."""
    if depth(schema) > JSON_DEPTH:
        raise RequestError(f"the schema is nested deeper than {JSON_DEPTH}", field="response_format")
    try:
        size = len(json.dumps(schema))
    except (TypeError, ValueError) as error:
        raise RequestError(f"the schema is not JSON: {error}", field="response_format") from error
    if size > MAX_SCHEMA_BYTES:
        raise RequestError(f"the schema is larger than {MAX_SCHEMA_BYTES} bytes", field="response_format")
    return schema


def _grammar(part: dict[str, object]) -> str:
    return json.dumps({"grammars": [part]})
