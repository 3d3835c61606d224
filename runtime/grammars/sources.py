"""Sources: what an answer must follow, as text. Only sizes are checked here, and nothing is compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ..errors import RequestError
from ..nesting import JSON_DEPTH, depth

if TYPE_CHECKING:
    from ..requests.params import SamplingParams

Schema = dict[str, Any] | bool

WHOLE = "start: value"  # the grammar of an answer that is one JSON value
MAX_BYTES = 256 << 10  # bytes of a schema as JSON


def of_schema(schema: Schema) -> str:
    """A source for JSON that the schema allows, written without blanks. RequestError if the schema is nested too deep
    or too large."""
    return of_lark(WHOLE, {"value": schema})


def of_regex(pattern: str) -> str:
    """A source for texts that match a regular expression as a whole, in the syntax of Rust's `regex` crate."""
    return json.dumps({"regex": pattern})


def of_lark(lark: str, schemas: Mapping[str, Schema] | None = None) -> str:
    """A source for texts that a grammar derives from its rule `start`, in llguidance's variant of Lark's EBNF.

    schemas: further rules by name, each for JSON that the schema allows; None: there are none. A `$ref` is resolved
    within its own schema. RequestError if a schema is nested too deep or too large.
    """
    given = {name: checked(schema) for name, schema in (schemas or {}).items()}
    return json.dumps({"lark": lark, "schemas": given})


def of_params(params: SamplingParams) -> str:
    """The source that sampling parameters require; "" for any text. RequestError if a schema is not JSON."""
    try:
        if params.json_schema is not None:
            return of_schema(dict(cast("Mapping[str, Any]", params.json_schema)))
    except (TypeError, ValueError) as error:
        raise RequestError(f"json_schema is not JSON: {error}", field="json_schema") from error
    if params.regex is not None:
        return of_regex(params.regex)
    return "" if params.grammar is None else of_lark(params.grammar)


def embedded(schema: Schema, number: int) -> Schema:
    """A schema to be embedded in another one, so that its `$ref`s still point into itself. `number`: distinguishes the
    parts of one schema."""
    if isinstance(schema, bool) or "$id" in schema:
        return schema
    return {**schema, "$id": f"urn:icc:part:{number}"}


def checked(schema: Schema) -> Schema:
    """The schema, unchanged. RequestError if it is nested deeper or is larger than the limits."""
    if depth(schema) > JSON_DEPTH:
        raise RequestError(f"the schema is nested deeper than {JSON_DEPTH}", field="response_format")
    if len(json.dumps(schema)) > MAX_BYTES:
        raise RequestError(f"the schema is larger than {MAX_BYTES} bytes", field="response_format")
    return schema
