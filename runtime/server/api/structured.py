"""response_format as the source of a grammar."""

from __future__ import annotations

from ...grammars.sources import of_lark, of_regex, of_schema
from .requests import GrammarFormat, JsonObjectFormat, JsonSchemaFormat, RegexFormat, ResponseFormat


def of_format(wanted: ResponseFormat | None) -> str:
    """The source, "" for any text. RequestError if a schema is nested too deep or too large."""
    if isinstance(wanted, JsonObjectFormat):
        return of_schema({"type": "object"})
    if isinstance(wanted, JsonSchemaFormat):
        return of_schema(wanted.json_schema.schema)
    if isinstance(wanted, RegexFormat):
        return of_regex(wanted.regex)
    if isinstance(wanted, GrammarFormat):
        return of_lark(wanted.grammar)
    return ""
