"""What an answer is to follow, as text: nothing is compiled or checked here beyond sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ..errors import RequestError
from ..nesting import JSON_DEPTH, depth

if TYPE_CHECKING:
    from ..requests.params import SamplingParams

Schema = dict[str, Any] | bool

WHOLE = "start: value"  # the grammar of an answer that is one value
MAX_BYTES = 256 << 10  # of a schema, as JSON


def of_schema(schema: Schema) -> str:
    """JSON that the schema allows, written without blanks. RequestError if it is nested too deep or too large."""
    return of_lark(WHOLE, {"value": schema})


def of_regex(pattern: str) -> str:
    """A text that a regular expression, in the syntax of Rust's `regex` crate, matches as a whole."""
    return json.dumps({"regex": pattern})


def of_lark(lark: str, schemas: Mapping[str, Schema] | None = None) -> str:
    """A text that a grammar in Lark's EBNF, as llguidance has it, derives from its rule `start`.

    `schemas` are further rules: JSON that each schema allows; None for none. A `$ref` is resolved within its own
    schema. RequestError if one is nested too deep or too large.
    """
    given = {name: checked(schema) for name, schema in (schemas or {}).items()}
    return json.dumps({"lark": lark, "schemas": given})


def of_params(params: SamplingParams) -> str:
    """What parameters say that the text must be; "" for any text. RequestError if a schema is no JSON."""
    try:
        if params.json_schema is not None:
            return of_schema(dict(cast("Mapping[str, Any]", params.json_schema)))
    except (TypeError, ValueError) as error:
        raise RequestError(f"json_schema is not JSON: {error}", field="json_schema") from error
    if params.regex is not None:
        return of_regex(params.regex)
    return "" if params.grammar is None else of_lark(params.grammar)


def embedded(schema: Schema, number: int) -> Schema:
    """A schema as a part of another one: its `$ref`s stay its own. `number` tells the parts of one schema apart."""
    if isinstance(schema, bool) or "$id" in schema:
        return schema
    return {**schema, "$id": f"urn:icc:part:{number}"}


def checked(schema: Schema) -> Schema:
    """The schema. RequestError if it is nested deeper or is larger than the limits."""
    if depth(schema) > JSON_DEPTH:
        raise RequestError(f"the schema is nested deeper than {JSON_DEPTH}", field="response_format")
    if len(json.dumps(schema)) > MAX_BYTES:
        raise RequestError(f"the schema is larger than {MAX_BYTES} bytes", field="response_format")
    return schema
