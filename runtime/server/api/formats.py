"""The format of an answer: OpenAI's response_format, and the same under vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from . import limits
from .fields import JsonText, Lark, Name, Regex


class JsonSchema(Struct, frozen=True):
    """A JSON schema that the answer follows, with the name that it has in the request."""

    name: Name
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(Struct, tag_field="type", tag="text", frozen=True):
    """Any text."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", frozen=True):
    """A JSON object, which matches the schema if one is given."""

    schema: dict[str, Any] | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", frozen=True):
    """A JSON value that matches a schema."""

    json_schema: JsonSchema


class RegexFormat(Struct, tag_field="type", tag="regex", frozen=True):
    """Extension: a text that a regular expression, in the syntax of Rust's `regex` crate, matches as a whole."""

    regex: Regex


class GrammarFormat(Struct, tag_field="type", tag="grammar", frozen=True):
    """Extension: a text that a grammar in Lark's EBNF derives from its rule `start`."""

    grammar: Lark


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat

Choices = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=limits.GRAMMAR_CHARS)]],
    Meta(min_length=1, max_length=limits.CHOICES),
]


class StructuredOutputs(Struct, forbid_unknown_fields=True, frozen=True):
    """vLLM's structured_outputs: one of the first five fields; a schema may be JSON in a string."""

    json: JsonText | dict[str, Any] | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Lark | None = None
    json_object: bool | None = None
