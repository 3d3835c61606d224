"""Depth of nested answers: no schema makes a check take long."""

from __future__ import annotations

from typing import Any

import pytest
from icc.runtime.errors import RequestError
from icc.runtime.grammars.effort import DEEPEST, deepest

from .walks import Walker


def chain(levels: int, link: Any) -> dict[str, Any]:
    definitions = {f"a{n}": link({"$ref": f"#/$defs/a{n + 1}"}) for n in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{levels}": {"type": ["string", "array"]}}}


TREE = {"type": "array", "items": {"$ref": "#"}}
TWICE = {"allOf": [{"items": {"$ref": "#"}}, {"items": {"$ref": "#"}}]}


def test_a_schema_that_visits_each_value_once_may_nest() -> None:
    assert deepest(True) == deepest({}) == deepest(TREE) == DEEPEST
    assert deepest({"properties": {"a": TREE, "b": {"anyOf": [TREE, {"type": "null"}]}}}) == DEEPEST


def test_ways_that_double_with_each_level_bound_the_levels() -> None:
    assert 5 < deepest(TWICE) < 15
    assert 5 < deepest({"$anchor": "x", "allOf": [{"items": {"$ref": "#x"}}, {"items": {"$ref": "#x"}}]}) < 15
    assert deepest(chain(30, lambda next: {"allOf": [{"items": next}, {"items": next}]})) < 15


def test_ways_that_double_in_place_are_refused(walker: Walker) -> None:
    schema = chain(30, lambda next: {"allOf": [next, next]})
    assert deepest(schema) == -1
    with pytest.raises(RequestError, match="too many cases"):
        walker.compile(schema)


def test_an_answer_nests_no_deeper(walker: Walker) -> None:
    make = walker.compile({"type": "array", **TWICE})
    levels = deepest({"type": "array", **TWICE})
    assert walker.follows(make(), "[" * levels + "]" * levels)
    assert not walker.follows(make(), "[" * (levels + 1) + "]" * (levels + 1))


def test_a_schema_with_more_cases_than_can_be_told_apart_is_refused_in_time(walker: Walker) -> None:
    choices = [
        {"anyOf": [{"properties": {f"a{n}": {"$ref": "#"}}}, {"properties": {f"b{n}": {"$ref": "#"}}}]}
        for n in range(20)
    ]
    with pytest.raises(RequestError, match="not supported"):
        walker.compile({"allOf": choices})


def test_what_no_form_says_is_checked_while_it_is_written(walker: Walker) -> None:
    """Two schemas refer to each other in a circle, and exactly one of them must accept the value."""
    branches = [{"$ref": f"#/$defs/{name}"} for name in "ab"]
    parts = {
        name: {"type": "object", "properties": {name: {"oneOf": branches}}, "required": [name], "maxProperties": 1}
        for name in "ab"
    }
    parts["a"]["properties"]["a"] = {"anyOf": [{"oneOf": branches}, {"type": "null"}]}
    make = walker.compile({"oneOf": branches, "$defs": parts})
    assert walker.follows(make(), '{"a":null}')
    assert walker.follows(make(), '{"b":{"a":null}}')
    assert not walker.follows(make(), '{"a":null,"b":{"a":null}}')
