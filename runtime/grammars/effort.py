"""Computes how deep an answer may nest so that checking it stays cheap.

A validator visits a value once for each path to it through the schema, and two `$ref`s to the same schema may double
the paths at every level.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .sources import Schema

DEEPEST = 100  # levels of any answer
_MOST_WAYS = 2_000  # paths to one value

_IN_PLACE = ("allOf", "anyOf", "oneOf")
_ONE = ("not", "if", "then", "else")
_EACH = (  # one schema for all of the parts
    "items", "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems", "contains",
)  # fmt: skip
_ANCHORS = ("$id", "id", "$anchor", "$dynamicAnchor")


def deepest(schema: Schema) -> int:
    """How many levels of objects and arrays an answer may have, at most DEEPEST; -1 if even a value without levels is
    too costly."""
    if isinstance(schema, bool):
        return DEEPEST
    ways = _Ways(schema)
    before: dict[int, int] | None = None
    for level in range(DEEPEST + 1):
        now = ways.next_level()
        if now[id(schema)] > _MOST_WAYS:
            return level - 1
        if now == before:  # the counts no longer change
            break
        before = now
    return DEEPEST


class _Ways:
    """Counts, for each schema in the document, the paths to a value some levels below the value that the schema applies
    to."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._all = list({id(part): part for part in subschemas(schema)}.values())
        self._anchored: dict[str, list[Any]] = {}
        for part in self._all:
            for key in _ANCHORS:
                if isinstance(part.get(key), str):
                    self._anchored.setdefault(part[key].strip("#").rpartition("/")[2], []).append(part)
        self._before: dict[int, int] | None = None

    def next_level(self) -> dict[int, int]:
        """The counts by the schema's id(): in the first call for the value itself, in each later call one level further
        down."""
        found: dict[int, int] = {}
        for part in self._all:
            self._count(part, found, set())
        self._before = found
        return found

    def _count(self, part: Any, found: dict[int, int], above: set[int]) -> int:
        if not isinstance(part, dict) or id(part) in above:
            return 1 if self._before is None else 0
        if id(part) not in found:
            above.add(id(part))
            own = 1 if self._before is None else self._below(part)
            total = own + sum(self._count(inner, found, above) for inner in self._beside(part))
            above.discard(id(part))
            found[id(part)] = min(total, _MOST_WAYS + 1)
        return found[id(part)]

    def _below(self, part: dict[str, Any]) -> int:
        """The number of paths through the schemas of a value's parts."""
        assert self._before is not None
        ways = 0
        properties = part.get("properties")
        lists = [properties.values() if isinstance(properties, dict) else ()]
        lists += [part[key] for key in ("prefixItems", "items") if isinstance(part.get(key), list)]
        for choices in lists:
            ways += max((self._ways(choice) for choice in choices), default=0)
        patterns = part.get("patternProperties")
        ways += sum(map(self._ways, patterns.values() if isinstance(patterns, dict) else ()))
        return ways + sum(self._ways(part[key]) for key in _EACH if isinstance(part.get(key), dict))

    def _ways(self, part: Any) -> int:
        assert self._before is not None
        return self._before.get(id(part), 0)

    def _beside(self, part: dict[str, Any]) -> Iterable[Any]:
        for key in _IN_PLACE:
            yield from part[key] if isinstance(part.get(key), list) else ()
        yield from (part[key] for key in _ONE if isinstance(part.get(key), dict))
        for key in ("dependentSchemas", "dependencies"):
            yield from part[key].values() if isinstance(part.get(key), dict) else ()
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(part.get(key), str):
                yield from self._targets(part[key])

    def _targets(self, reference: str) -> list[Any]:
        """The schemas that a reference may mean: one for a pointer into the document, else all schemas of that name,
        else the whole schema."""
        if reference.startswith("#/") and not self._anchored:
            return [pointed(self._schema, reference)]
        if "#/" in reference:  # a pointer into some part with an identifier
            whole = [self._schema, *(part for parts in self._anchored.values() for part in parts)]
            found = [pointed(part, "#" + reference.partition("#")[2]) for part in whole]
            return [part for part in {id(part): part for part in found if isinstance(part, dict)}.values()]
        name = (reference.partition("#")[2] or reference.strip("#")).rpartition("/")[2]
        return self._anchored.get(name, [self._schema])


def subschemas(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a document, which may be a schema."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from subschemas(part)


def pointed(value: Any, reference: str) -> Any:
    """The value at a pointer `#/a/b`; None if there is none."""
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~").replace("%25", "%").replace("%22", '"')
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict):
            value = value.get(name)
        else:
            return None
    return value
