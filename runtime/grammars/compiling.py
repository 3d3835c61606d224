"""Lowers a source to a grammar of llguidance."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ..errors import RequestError
from .documents import Document
from .effort import DEEPEST, deepest
from .gbnf import as_lark
from .languages import is_empty
from .limits import parser_limits
from .rules import Rules
from .sources import WHOLE, Schema
from .values import ValueRules


class LoweredGrammar(msgspec.Struct, frozen=True):
    """`grammar` is in llguidance's own format. The other fields are arguments of `following.Checks`, which is not
    needed if `schemas` is empty."""

    grammar: str
    schemas: list[Schema] = []
    whole: bool = False
    distinct: bool = False
    close: bool = False
    deepest: int = DEEPEST


def lowered(source: str) -> str:
    """Lower a source to a `LoweredGrammar` in JSON. RequestError if it is no grammar or exceeds the limits."""
    wanted = msgspec.json.decode(source)
    return source if "grammar" in wanted else msgspec.json.encode(_lowered(wanted)).decode()


def _lowered(wanted: dict[str, Any]) -> LoweredGrammar:
    import llguidance

    if "regex" in wanted:
        found = LoweredGrammar(llguidance.LLMatcher.grammar_from_regex(wanted["regex"]))
    else:
        schemas = wanted["schemas"]
        parts = [_rules(schema, number) for number, schema in enumerate(schemas.values())]
        lark = [as_lark(wanted["lark"]), *(f"{name}: {part[0]}" for name, part in zip(schemas, parts, strict=True))]
        found = LoweredGrammar(
            json.dumps({"grammars": [{"lark_grammar": "\n".join(lark)}]}),
            list(schemas.values()),
            whole=wanted["lark"] == WHOLE,
            distinct=any(values.distinct for _, values in parts),
            close=any(values.wider for _, values in parts),
            deepest=min((_depth(schema) for schema in schemas.values()), default=DEEPEST),
        )
    if error := llguidance.LLMatcher.validate_grammar(found.grammar, limits=parser_limits()):
        raise RequestError(f"the grammar was refused: {' '.join(error.split())[:300]}", field="response_format")
    return found


def _depth(schema: Schema) -> int:
    """How deep an answer may nest; see `effort.deepest`. RequestError if no depth is possible."""
    levels = deepest(schema)
    if levels < 0:
        raise RequestError("the schema is too large: too many cases", field="response_format")
    return levels


def _rules(schema: Schema, number: int) -> tuple[str, ValueRules]:
    """The body of the schema's rule, followed by the rules that it needs."""
    rules = Rules(number)
    try:
        values = ValueRules(Document(schema), rules)
        start = values.start()
    except (ValueError, RecursionError) as error:  # jsonschema-rs has no canonical form for the schema
        raise RequestError(f"the schema is not supported: {error}"[:300], field="response_format") from error
    empty = frozenset(name for text, name in rules.terminals.items() if ("&" in text or "~" in text) and is_empty(text))
    text = rules.written(start, empty)
    if text is None:
        raise RequestError("no value satisfies the schema", field="response_format")
    return f"{start}\n{text}", values
