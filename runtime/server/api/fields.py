"""Types of fields that several bodies of the API share."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from . import limits

Name = Annotated[str, Meta(min_length=1, max_length=limits.NAME_CHARS, pattern="^[a-zA-Z0-9_.-]+$")]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1, extra_json_schema={"x-token": True})]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Tokens = Annotated[list[TokenId], Meta(min_length=1)]
Stop = Annotated[str, Meta(min_length=1, max_length=limits.STOP_CHARS)]
Text = Annotated[str, Meta(max_length=limits.BODY_BYTES)]
Regex = Annotated[str, Meta(min_length=1, max_length=limits.GRAMMAR_CHARS, extra_json_schema={"format": "rust-regex"})]
JsonText = Annotated[str, Meta(max_length=limits.BODY_BYTES, extra_json_schema={"format": "json-object"})]
Lark = Annotated[str, Meta(min_length=1, max_length=limits.GRAMMAR_CHARS, extra_json_schema={"format": "lark"})]

_text = {"type": "string"}
_token = {"type": "integer", "minimum": 0, "x-token": True}


def _texts_or_tokens(most: int) -> dict[str, Any]:
    """A text, token ids, or up to `most` of either kind."""
    many = {"type": "array", "minItems": 1, "maxItems": most}
    tokens = {"type": "array", "minItems": 1, "items": _token}
    return {"anyOf": [_text, {**many, "items": _text}, tokens, {**many, "items": tokens}]}


# JSON Schema states the four kinds of prompt; msgspec allows one kind of array, so `prompts()` checks the rest
PROMPT_SCHEMA = _texts_or_tokens(limits.PROMPTS)
INPUT_SCHEMA = _texts_or_tokens(limits.INPUTS)
