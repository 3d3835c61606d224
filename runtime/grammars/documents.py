"""Documents: a JSON schema in canonical form, and the order of its properties, which that form loses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .effort import pointed, subschemas
from .formats import asserted
from .sources import Schema

if TYPE_CHECKING:
    from jsonschema_rs import CanonicalSchema, Validator

_DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/(2019-09|2020-12))/schema#?")
_BACKTRACKS = 100_000  # steps of a regular expression over one string


class Document:
    """A JSON schema. RequestError if it is no schema, or if a reference leads nowhere or endlessly back to itself.

    jsonschema-rs converts it to canonical form, in which `not`, `if`, `dependentSchemas` and the like are resolved into
    cases; `root` is this form, with the known formats as patterns. The form does not keep the order of properties.
    """

    def __init__(self, schema: Schema) -> None:
        self._orders = list(_orders(schema))
        _check_references(schema)
        plain = _known_dialect(schema)
        self.root = _canonical(asserted(plain))
        if not satisfiable(self.root):
            self.root = _canonical(plain)

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Names of properties in the order of the `properties` that lists most of them; if it lists all, its further
        names are included."""
        wanted = dict.fromkeys(names)
        found: dict[str, None] = {}
        orders = sorted(self._orders, key=lambda order: (-sum(name in wanted for name in order), len(order)))
        if orders and wanted and all(name in orders[0] for name in wanted):
            return list(orders[0])
        for order in orders:
            if len(found) == len(wanted):
                break
            found.update((name, None) for name in order if name in wanted)
        return [*found, *(name for name in wanted if name not in found)]


def validator(schema: Any) -> Validator:
    """A validator for a schema; formats are annotations. RequestError if it is no schema."""
    import jsonschema_rs

    try:
        return jsonschema_rs.validator_for(
            _known_dialect(schema),
            validate_formats=False,
            offline=True,
            pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACKS),
        )
    except ValueError as error:
        raise _refused(error) from error


def satisfiable(node: CanonicalSchema) -> bool:
    """Whether a value may be valid; False only if it is proven that no value is valid."""
    return str(node.satisfiability().value) != "no"


def _canonical(schema: Schema) -> CanonicalSchema:
    import jsonschema_rs

    try:
        return jsonschema_rs.canonicalize(schema, offline=True, validate_formats=False)
    except ValueError as error:
        raise _refused(error) from error


def _refused(error: Exception) -> RequestError:
    reason = str(error).split("\n\n")[0].strip()
    return RequestError(f"the schema was refused: {reason[:300]}", field="response_format")


def _known_dialect(schema: Schema) -> Schema:
    """The schema without its `$schema` if that is no draft of JSON Schema: it is then read as draft 2020-12."""
    if isinstance(schema, bool) or _DIALECT.fullmatch(str(schema.get("$schema"))):
        return schema
    return {key: value for key, value in schema.items() if key != "$schema"}


def _orders(value: Any, in_constant: bool = False) -> Iterator[tuple[str, ...]]:
    """The orders in which properties are declared, or occur in constants."""
    if isinstance(value, dict):
        properties = value if in_constant else value.get("properties")
        if isinstance(properties, dict):
            yield tuple(properties)
        for key, part in value.items():
            yield from _orders(part, in_constant or (key in ("const", "enum") and not isinstance(part, bool)))
    elif isinstance(value, list):
        for part in value:
            yield from _orders(part, in_constant)


def _check_references(schema: Schema) -> None:
    """Raise RequestError for `$ref`s in a circle that all apply to the same value, so that a value would be valid if it
    is valid."""
    if "$id" in str(schema):  # then pointers are not relative to the whole document
        return
    done: set[int] = set()
    for start in subschemas(schema):
        path: list[tuple[int, Iterator[Any]]] = [(id(start), _in_place(start, schema))]
        while path:
            inner = next(path[-1][1], path)
            if inner is path:
                done.add(path.pop()[0])
            elif isinstance(inner, dict) and id(inner) not in done:
                if any(id(inner) == outer for outer, _ in path):
                    raise RequestError("the schema was refused: a $ref leads back to itself", field="response_format")
                path.append((id(inner), _in_place(inner, schema)))


def _in_place(part: dict[str, Any], schema: Schema) -> Iterator[Any]:
    """The subschemas that apply to the same value."""
    reference = part.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        yield pointed(schema, reference)
    for key in ("allOf", "anyOf", "oneOf"):
        yield from part[key] if isinstance(part.get(key), list) else ()
    for key in ("not", "if", "then", "else"):
        yield part.get(key)
    yield from part["dependentSchemas"].values() if isinstance(part.get("dependentSchemas"), dict) else ()
