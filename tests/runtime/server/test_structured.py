"""Grammars and tool calls: answers follow them, and hostile grammars are refused (RELIABILITY S5)."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from .conftest import Served

pytestmark = pytest.mark.usefixtures("idle_after")


def constrained(served: Served, wanted: dict[str, Any], **fields: Any) -> str:
    answer = served.complete("a", max_tokens=200, response_format=wanted, **fields)
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    return answer["choices"][0]["text"]


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "kind": {"enum": ["cat", "dög"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(4))
def test_json_follows_its_schema(served: Served, seed: int) -> None:
    """Stop strings and stop tokens of the client do not end it early."""
    stops = {"stop": ["a", "1"], "stop_token_ids": [ord('"')]} if seed % 2 else {}
    value = json.loads(constrained(served, schema(PERSON), temperature=30, seed=seed, **stops))
    assert set(value) == {"name", "age", "kind", "tags"} and len(value["name"]) <= 6
    assert 10 <= value["age"] <= 99 and value["kind"] in ("cat", "dög") and len(value["tags"]) <= 3


@pytest.mark.parametrize("seed", range(2))
def test_what_a_grammar_cannot_say_is_followed_too(served: Served, seed: int) -> None:
    item = {"type": "integer", "minimum": 0, "maximum": 70}
    unique = {"type": "array", "uniqueItems": True, "items": item, "minItems": 5, "maxItems": 5}
    value = json.loads(constrained(served, schema(unique), temperature=30, seed=seed))
    assert len({*value}) == len(value) == 5
    large = {"type": "integer", "minimum": 2**64, "maximum": 2**64 + 9}
    assert 0 <= json.loads(constrained(served, schema(large), temperature=30, seed=seed)) - 2**64 < 10


def test_regex_and_grammar(served: Served) -> None:
    for seed in range(3):
        text = constrained(served, {"type": "regex", "regex": "[a-c]{2,5}-[0-9]+!"}, temperature=30, seed=seed)
        assert re.fullmatch("[a-c]{2,5}-[0-9]+!", text)
    lark = 'start: sum "."\nsum: NUMBER ("+" NUMBER)~2\nNUMBER: /[1-9]/\n'
    text = constrained(served, {"type": "grammar", "grammar": lark}, temperature=30, seed=1)
    assert re.fullmatch(r"[1-9](\+[1-9]){2}\.", text)


def test_a_json_object(served: Served) -> None:
    answer = served.complete("a", max_tokens=40, response_format={"type": "json_object"}, temperature=30, seed=3)
    assert answer["choices"][0]["text"].startswith("{")


def test_grammars_run_beside_other_requests_and_for_several_completions(served: Served) -> None:
    answer = served.complete(
        ["a", "b"], n=3, max_tokens=50, temperature=30, seed=5, response_format={"type": "regex", "regex": "[xyz]{8}"}
    )
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(texts) == 6 and all(re.fullmatch("[xyz]{8}", text) for text in texts) and len(set(texts)) > 1


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        value = {"type": "array", "items": value}
    return value


HOSTILE = [
    {"type": "regex", "regex": "(" * 5000 + "a" + ")" * 5000},
    {"type": "regex", "regex": "a("},
    {"type": "grammar", "grammar": "start: " + "(" * 8000},
    {"type": "grammar", "grammar": "start: nothing"},
    {"type": "grammar", "grammar": ""},
    {"type": "grammar", "grammar": "root ::= (" * 999},
    schema(nested(101)),
    schema({"type": "no such type"}),
    schema({"$ref": "#/nowhere"}),
    schema({"$ref": "#"}),
    schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    schema({"$ref": "http://127.0.0.1:1/x"}),
    schema({"type": "string", "pattern": "("}),
    schema({"description": "x" * 300_000}),
]
HEAVY = [
    {"type": "regex", "regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"type": "grammar", "grammar": "start: start"},
    {"type": "regex", "regex": "(a+)+$"},
    {"type": "regex", "regex": "a{1,1000000000}"},
    {"type": "regex", "regex": "(a|b)*a(a|b){30}"},
    {"type": "regex", "regex": "(.*)*x(.*)*y(.*)*z"},
    {"type": "grammar", "grammar": 'start: start start | "a" | "b"'},
    schema(nested(60)),
    schema({"type": "array", "items": {"enum": [f"v{i}" for i in range(800)]}}),
]


@pytest.mark.parametrize("wanted", HOSTILE)
def test_a_grammar_that_is_none_or_too_much_is_refused_in_words(served: Served, wanted: dict[str, Any]) -> None:
    body = {"model": "toy", "prompt": "a", "max_tokens": 4, "response_format": wanted}
    reply = served.ask("POST", "/v1/completions", body)
    assert reply.status == 400 and reply.json["error"]["param"].startswith("response_format"), reply.raw


@pytest.mark.parametrize("wanted", HEAVY)
def test_a_heavy_grammar_ends_well_or_in_words_and_delays_nobody(served: Served, wanted: dict[str, Any]) -> None:
    body = {"model": "toy", "prompt": "a", "max_tokens": 24, "response_format": wanted, "temperature": 30, "seed": 1}
    assert served.ask("POST", "/v1/completions", body).status in (200, 400, 500)
    assert served.complete("a", max_tokens=2)["choices"][0]["text"] == "bc"


# -- tools -----------------------------------------------------------------------------------------------------------


def tool(name: str, city: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": [city]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", "Oslo"), tool("time", "Rome")]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_a_tool_that_must_be_called_is_called(served: Served, choice: Any) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    fields |= {"max_tokens": 200, "temperature": 30, "seed": 2}
    [answer] = served.chat("x", **fields)["choices"]
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
    [call] = answer["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    cities = {"weather": "Oslo", "time": "Rome"}
    assert call["type"] == "function" and call["id"] and arguments["city"] == cities[call["function"]["name"]]
    assert choice == "required" or call["function"]["name"] == "time"

    events = served.chat("x", stream=True, **fields)
    deltas = [event["choices"][0]["delta"] for event in events]
    streamed = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert {piece["index"] for piece in streamed} == {0} and len(streamed) > 2  # arguments are streamed in pieces
    named = [piece["function"]["name"] for piece in streamed if "name" in piece["function"]]
    assert named == [call["function"]["name"]] and streamed[0]["type"] == "function" and "id" not in streamed[1]
    assert "".join(piece["function"]["arguments"] for piece in streamed) == call["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert not any(delta.get("content") for delta in deltas)


def test_definitions_of_a_tool_stay_its_own(served: Served) -> None:
    city = {"$ref": "#/$defs/City"}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    tools = [
        {
            "type": "function",
            "function": {"name": name, "parameters": {**parameters, "$defs": {"City": {"const": name}}}},
        }
        for name in ("Oslo", "Rome")
    ]
    fields = {"tools": tools, "tool_choice": "required", "max_tokens": 200, "temperature": 30, "seed": 3}
    [answer] = served.chat("x", **fields)["choices"]
    [call] = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": call["function"]["name"]}


def test_tools_are_optional_and_may_be_forbidden(served: Served) -> None:
    for choice in ("auto", "none"):
        [answer] = served.chat("x", tools=TOOLS, tool_choice=choice, max_tokens=3)["choices"]
        assert answer["message"]["content"] == "\x0b\x0c\r" and "tool_calls" not in answer["message"]


def test_a_tool_that_does_not_exist_cannot_be_chosen(served: Served) -> None:
    named = {"type": "function", "function": {"name": "other"}}
    body = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": named}
    reply = served.ask("POST", "/v1/chat/completions", body)
    assert reply.status == 400 and reply.json["error"]["param"] == "tool_choice"
