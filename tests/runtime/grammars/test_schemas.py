"""Structured output is correct: an answer that ends is valid, and a valid answer is possible."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from icc.runtime.errors import RequestError
from icc.runtime.grammars.sources import of_lark

from .walks import Walker

UNSATISFIABLE = [
    False,
    {"not": {"format": "date"}},  # only an annotation: every value satisfies it
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "string", "minLength": 3, "maxLength": 2},
    {"type": "string", "pattern": "^a$", "not": {"pattern": "^a"}},
    {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "^b"}]},
    {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3},
    {"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 13},
    {"type": "object", "minProperties": 3, "patternProperties": {"^[ab]$": True}, "additionalProperties": False},
    {"type": "object", "required": ["a"], "propertyNames": {"pattern": "^b"}},
]
REFUSED = [
    ({"$ref": "#"}, "leads back to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}, "itself"),
    ({"$ref": "#/$defs/none"}, "does not exist"),
    ({"$ref": "http://127.0.0.1:1/x"}, "refused"),
    ({"type": "nothing"}, "refused"),
    ({"type": "string", "pattern": "("}, "refused"),
    ({"type": "string", "pattern": r"(a)\1"}, "back references"),
    ({"type": "string", "pattern": "(?<=a)b"}, "lookbehind"),
]


@pytest.mark.parametrize("schema", UNSATISFIABLE, ids=str)
def test_what_no_value_satisfies_is_refused(walker: Walker, schema: Any) -> None:
    with pytest.raises(RequestError, match="no value satisfies"):
        walker.compile(schema)


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=str)
def test_what_is_no_schema_is_refused_in_words(walker: Walker, schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        walker.compile(schema)
    assert caught.value.field == "response_format" and len(caught.value.message) < 400


# (schema, texts that it accepts, texts that it does not)
CASES: list[tuple[Any, list[str], list[str]]] = [
    (
        {"type": "integer", "minimum": 2**70, "maximum": 2**70 + 5},
        [str(2**70), str(2**70 + 5)],
        [str(2**70 - 1), str(2**70 + 6), "1"],
    ),
    ({"type": "integer", "exclusiveMaximum": -(2**64)}, [str(-(2**64) - 1)], [str(-(2**64)), "0", "5"]),
    ({"type": "number", "minimum": 0.1, "exclusiveMaximum": 0.25}, ["0.1", "0.2499"], ["0.09", "0.25", "0", "1"]),
    ({"type": "number", "not": {"type": "integer"}}, ["0.5", "-1.25"], ["1", "1.0"]),
    ({"type": "number"}, ["1e10", "-0.5", "12"], ["1e999", "01"]),
    (
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "integer"}},
            "additionalProperties": False,
            "minProperties": 2,
        },
        ['{"a":1,"ab":2}'],
        ['{"a":1,"a":2}', '{"a":1}', '{"b":1,"a":2}'],
    ),
    ({"type": "object"}, ['{"a":1,"b":{"a":1}}'], ['{"a":1,"a":1}', '{"a":{"b":1,"b":2}}']),
    (
        {"type": "array", "uniqueItems": True, "items": {"type": "object"}},
        ['[{"a":1},{"a":2}]', "[]"],
        ['[{"a":1},{"a":1}]', '[{"a":1,"b":2},{"b":2,"a":1.0}]'],
    ),
    (
        {"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True, "items": {"type": "string"}}]},
        ["null", '["a","b"]'],
        ['["a","a"]'],
    ),
    (
        {"properties": {"set": {"uniqueItems": True}, "list": {"type": "array"}}, "type": "object"},
        ['{"set":[1,2],"list":[1,1]}'],
        ['{"set":[1,1]}'],
    ),
    ({"type": "array", "uniqueItems": True, "items": {"enum": ["x", "y", 3]}}, ['["y",3,"x"]'], ['["x","x"]', "[4]"]),
    ({"format": "no such format", "type": "string"}, ['"x"'], ["1"]),
    ({"format": "date", "type": "string"}, ['"2024-02-28"'], ['"2024-02-31"', '"x"']),
    ({"type": "string", "pattern": "^(?=.*[A-Z])(?!X).{2,4}$"}, ['"aB"', '"é\\"B"'], ['"ab"', '"XB"', '"AAAAA"']),
    ({"type": "string", "not": {"enum": ["a", "b"]}, "maxLength": 1}, ['"c"', '""'], ['"a"', '"b"', '"cc"']),
    ({"not": {"type": ["string", "object"]}}, ["1", "[]", "null"], ['"a"', "{}"]),
    (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}, "x": {}, "y": {}},
            "required": ["kind"],
            "additionalProperties": False,
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["x"]},
            "else": {"required": ["y"]},
        },
        ['{"kind":"a","x":1}', '{"kind":"b","y":null}'],
        ['{"kind":"a"}', '{"kind":"b","x":1}'],
    ),
    (
        {"type": "array", "contains": {"const": 5}, "maxContains": 1, "items": {"type": "integer"}},
        ["[5]", "[1,5,2]"],
        ["[]", "[1]", "[5,5]"],
    ),
    (
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "properties": {"a": {}, "b": {}}},
        ['{"a":1}', '{"b":1}'],
        ["{}", '{"a":1,"b":1}'],
    ),
    (
        {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "$defs": {
                "cat": {
                    "type": "object",
                    "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
                    "required": ["kind"],
                },
                "dog": {
                    "type": "object",
                    "properties": {"kind": {"const": "dog"}, "bark": {"type": "string"}},
                    "required": ["kind"],
                },
            },
        },
        ['{"kind":"cat","lives":9}', '{"kind":"dog","bark":"w"}'],
        ['{"kind":"cow"}', '{"kind":"cat","lives":"x"}'],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "dependentRequired": {"a": ["b"]},
            "unevaluatedProperties": False,
        },
        ["{}", '{"b":1}', '{"a":1,"b":1}'],
        ['{"a":1}', '{"c":1}'],
    ),
    ({"type": "object", "propertyNames": {"maxLength": 2}, "minProperties": 1}, ['{"ab":1}'], ["{}", '{"abc":1}']),
    ({"type": "integer", "not": {"multipleOf": 3}}, ["1", "14"], ["0", "3", "12"]),
    ({"not": {"uniqueItems": True}}, ["[1,1]", '[1,2,"1",1.0]'], ["[]", "[1,2]", '"x"']),
    (
        {"type": "object", "properties": {"z": {"const": {"q": 1, "b": 2}}, "a": {}}, "required": ["a", "z"]},
        ['{"z":{"q":1,"b":2},"a":1}'],
        ['{"a":1}'],
    ),
    (
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        ['{"next":{"next":null}}'],
        ["{}", '{"next":{}}'],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=lambda value: str(value)[:60])
def test_a_schema_is_followed(walker: Walker, schema: Any, valid: list[str], invalid: list[str]) -> None:
    make = walker.compile(schema)
    for text in valid:
        assert walker.follows(make(), text), text
    for text in invalid:
        assert not walker.follows(make(), text), text
    for seed in range(3):
        text, end = walker.walk(make(), seed)
        assert end != "error", text
        if end == "stop":
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def test_a_refused_token_leaves_exactly_those_that_may_come(walker: Walker) -> None:
    constraint = walker.compile({"type": "array", "uniqueItems": True, "items": {"type": "integer"}})()
    for char in "[12,12":
        [token] = walker.tokenizer.encode(char, add_special_tokens=False).ids
        assert constraint.allowed()[token] and constraint.accept(token)
    [close] = walker.tokenizer.encode("]", add_special_tokens=False).ids
    assert constraint.allowed()[close] and not constraint.accept(close)
    assert not constraint.allowed()[close] and constraint.allowed().any()
    for token in constraint.allowed().nonzero()[0]:
        assert "]" not in walker.tokenizer.decode([int(token)])


@pytest.mark.parametrize(
    "items", [{"type": "integer", "minimum": 0, "maximum": 69}, {"enum": [f"v{n}" for n in range(70)]}]
)
def test_distinct_items_never_lead_where_nothing_can_follow(walker: Walker, items: Any) -> None:
    """If 7 is an item already, a next item that begins with 7 must become another number; 70 values are enough to meet
    that."""
    make = walker.compile({"type": "array", "uniqueItems": True, "items": items, "minItems": 12, "maxItems": 12})
    for seed in range(3):
        text, end = walker.walk(make(), seed, most=200)
        assert end == "stop" and len(set(json.loads(text))) == 12, text


def test_values_within_other_text_are_followed_too(walker: Walker) -> None:
    lark = 'start: "call " value (" and " value)? "!"'
    make = walker.grammars.compile(
        of_lark(lark, {"value": {"type": "object", "additionalProperties": {"type": "integer"}}})
    )
    assert walker.follows(make(), 'call {"a":1} and {"a":2}!')
    assert not walker.follows(make(), 'call {"a":1} and {"a":2,"a":3}!')
    assert not walker.follows(make(), 'call {"a":1,"a":1}!')


def test_a_grammar_from_which_nothing_follows_never_ends_in_an_answer(walker: Walker) -> None:
    make = walker.grammars.compile(of_lark("start: A\nA: /a/ & /b/"))
    assert not make().allowed().any()
