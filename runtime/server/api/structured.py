"""response_format as a grammar."""

from __future__ import annotations

from ...grammars.source import checked, of_lark, of_regex, of_schema
from .requests import GrammarFormat, JsonObjectFormat, JsonSchemaFormat, RegexFormat, ResponseFormat

__all__ = ["checked", "of_format", "of_lark"]


def of_format(wanted: ResponseFormat | None) -> str:
    """The grammar, "" for any text. RequestError if a schema is nested too deep or too large."""
    if isinstance(wanted, JsonObjectFormat):
        return of_schema({"type": "object"})
    if isinstance(wanted, JsonSchemaFormat):
        return of_schema(wanted.json_schema.schema)
    if isinstance(wanted, RegexFormat):
        return of_regex(wanted.regex)
    if isinstance(wanted, GrammarFormat):
        return of_lark(wanted.grammar)
    return ""
