"""response_format as the source of a grammar."""

from __future__ import annotations

from ...grammars.sources import of_lark, of_regex, of_schema
from .formats import GrammarFormat, JsonObjectFormat, JsonSchemaFormat, RegexFormat, ResponseFormat


def of_format(wanted: ResponseFormat | None) -> str:
    """The grammar source of a format; "" if any text is allowed, as for None. RequestError if a schema is nested too
    deep or too large."""
    if isinstance(wanted, JsonObjectFormat):
        return of_schema({"type": "object"} if wanted.schema is None else wanted.schema)
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.json_schema.schema
        return of_schema({} if schema is None else schema)
    if isinstance(wanted, RegexFormat):
        return of_regex(wanted.regex)
    if isinstance(wanted, GrammarFormat):
        return of_lark(wanted.grammar)
    return ""
