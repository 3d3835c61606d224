"""Conversations that clients send back, converted to the form that a template accepts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from icc.runtime.errors import RequestError
from icc.runtime.reading.formats import AnswerFormat, CallFormat
from icc.runtime.reading.history import fitted
from icc.runtime.server.api.decoding import decoded
from icc.runtime.server.api.errors import HttpError
from icc.runtime.server.api.offers import Offer, offer_of
from icc.runtime.server.api.requests import ChatRequest, CompletionRequest

PLAIN = AnswerFormat(CallFormat("object"))
USER = {"role": "user", "content": "x"}


def request(**fields: Any) -> ChatRequest:
    return decoded(json.dumps({"model": "m", "messages": [USER], **fields}).encode(), ChatRequest)


def history(*messages: dict[str, Any], form: AnswerFormat = PLAIN) -> list[dict[str, Any]]:
    return fitted([msgspec.to_builtins(message) for message in request(messages=list(messages)).messages], form)


def call(number: int, name: str = "f", arguments: Any = '{"a": 1}') -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "index": number, "function": function}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": f"r{number}"}


def test_what_clients_add_to_messages_passes() -> None:
    said = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
        "provider_specific_fields": {"refusal": None}, "thinking_blocks": None, "tool_calls": [call(0)],
        "extra": {"a": 1},
    }  # fmt: skip
    _, built, answer = history(USER, said, {**result(0), "name": "f", "extra": 1})
    function = {"name": "f", "arguments": {"a": 1}}
    assert built == {
        "role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]
    }  # fmt: skip
    assert answer == {"role": "tool", "tool_call_id": "call_0", "content": "r0", "name": "f"}


def test_contents_are_texts() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "refusal", "refusal": "b"}]
    assert history({"role": "assistant", "content": parts})[0]["content"] == "ab"
    assert history({"role": "assistant", "refusal": "no"})[0]["content"] == "no"
    with pytest.raises(HttpError) as refused:
        history({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]})
    assert refused.value.param == "messages[0].content[0].type"


def test_thoughts_have_all_their_names() -> None:
    [built] = history({"role": "assistant", "content": "a", "reasoning_content": "hm"})
    assert built["reasoning_content"] == built["reasoning"] == built["thinking"] == "hm"
    [given] = fitted([{"role": "assistant", "content": "a", "thinking": "hm"}], AnswerFormat())
    assert given == built


def test_the_older_form_of_calls() -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    built, answer = history(called, {"role": "function", "name": "f", "content": "r"})
    assert built["tool_calls"] == [{"id": "f", "type": "function", "function": {"name": "f", "arguments": {}}}]
    assert answer == {"role": "tool", "name": "f", "tool_call_id": "f", "content": "r"}


@pytest.mark.parametrize(
    ("given", "built"),
    [
        ('{"a": 1e999}', {"a": "1e999"}),
        ('{"a": NaN}', {"a": "NaN"}),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("no json", "no json"),
        ("", {}),
        (None, {}),
        ({"a": [1]}, {"a": [1]}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
    ],
)
def test_arguments_are_values_that_can_be_written_again(given: Any, built: Any) -> None:
    [message] = history({"role": "assistant", "tool_calls": [call(0, arguments=given)]})
    assert message["tool_calls"][0]["function"]["arguments"] == built


def test_arguments_are_not_nested_without_end() -> None:
    with pytest.raises(RequestError, match="nested"):
        history({"role": "assistant", "tool_calls": [call(0, arguments="[" * 150 + "]" * 150)]})


def test_what_a_template_does_not_know_is_fitted_to_it() -> None:
    conversation = [
        {"role": "developer", "content": "d"}, {"role": "assistant", "tool_calls": [call(0), call(1, "g")]},
        result(1), result(0), USER,
    ]  # fmt: skip
    assert history(*conversation)[0]["role"] == "system"
    assert history(*conversation, form=replace(PLAIN, developer=True))[0]["role"] == "developer"

    short = history(*conversation, form=replace(PLAIN, ids="short"))
    ids = [one["id"] for one in short[1]["tool_calls"]]
    assert all(len(one) == 9 and one.isalnum() for one in ids) and ids == [
        short[3]["tool_call_id"],
        short[2]["tool_call_id"],
    ]
    named = history(*conversation, form=replace(PLAIN, ids="named"))
    assert [one["id"] for one in named[1]["tool_calls"]] == ["functions.f:0", "functions.g:1"]
    assert named[2]["tool_call_id"] == "functions.g:1"

    single = history(*conversation, form=replace(PLAIN, calls=CallFormat("object", parallel=False)))
    assert [(m["role"], m.get("tool_call_id") or m.get("tool_calls", [{}])[0].get("id")) for m in single] == [
        ("system", None), ("assistant", "call_0"), ("tool", "call_0"), ("assistant", "call_1"), ("tool", "call_1"),
        ("user", None),
    ]  # fmt: skip
    text = history(*conversation, form=replace(PLAIN, arguments_as_text=True))
    assert text[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


# -- fields ----------------------------------------------------------------------------------------------------------


def test_null_is_as_good_as_nothing_and_so_are_the_defaults_of_others() -> None:
    nothing = dict.fromkeys(["n", "seed", "audio", "web_search_options", "min_tokens", "ignore_eos", "no_such_field"])
    assert request(**nothing, use_beam_search=False, length_penalty=1.0, typical_p=1, num_beam_groups=1) == request()
    assert request(stream_options={"include_usage": True, "include_obfuscation": False}).stream_options is not None
    for field, value in {
        "length_penalty": True,
        "early_stopping": "always",
        "no_such_field": 1,
        "audio": {"voice": "a"},
    }.items():
        with pytest.raises(HttpError) as refused:
            request(**{field: value})
        assert refused.value.status == 400 and refused.value.param == field


def test_standard_fields_are_taken() -> None:
    found = request(
        prompt_cache_key="k", safety_identifier="s", verbosity="low", modalities=["text"], tools=[], n=None, seed=-1,
        prediction={"type": "content", "content": "x"}, stop=["a"] * 20, reasoning_effort="none", store=False,
        response_format={"type": "json_object", "schema": {"type": "object"}}, metadata={}, top_k=-1,
    )  # fmt: skip
    assert found.n == 1 and found.seed == -1
    with pytest.raises(HttpError) as refused:
        request(modalities=["text", "audio"])
    assert refused.value.param == "modalities[1]"
    raw = {"model": "m", "prompt": ["a"] * 500, "best_of": 3, "suffix": None, "max_tokens": 0, "n": None}
    assert decoded(json.dumps(raw).encode(), CompletionRequest).best_of == 3


TOOLS = [{"type": "function", "function": {"name": name}} for name in "fgh"]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def offered(**fields: Any) -> tuple[list[str], bool, int | None, bool]:
    found: Offer = offer_of(request(**fields))
    return list(found.schemas), found.must, found.most, found.legacy


def test_what_tools_may_be_called() -> None:
    assert offered() == offered(tools=[]) == offered(tools=TOOLS, tool_choice="none") == ([], False, None, False)
    assert offered(tools=TOOLS) == offered(tools=TOOLS, tool_choice="auto") == (["f", "g", "h"], False, None, False)
    assert offered(tools=TOOLS, parallel_tool_calls=False) == (["f", "g", "h"], False, 1, False)
    assert offered(tools=TOOLS, tool_choice="required") == (["f", "g", "h"], True, None, False)
    assert offered(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}}) == (["g"], True, 1, False)
    assert offered(tools=TOOLS, tool_choice=allowed("auto", "h", "f")) == (["h", "f"], False, None, False)
    assert offered(tools=TOOLS, tool_choice=allowed("required", "h")) == (["h"], True, None, False)
    functions = [tool["function"] for tool in TOOLS]
    assert offered(functions=functions) == (["f", "g", "h"], False, 1, True)
    assert offered(functions=functions, function_call={"name": "g"}) == (["g"], True, 1, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": [], "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        {"tools": TOOLS, "tool_choice": allowed("auto", "x")},
    ],
)
def test_a_tool_that_is_not_there_cannot_be_asked_for(fields: dict[str, Any]) -> None:
    with pytest.raises(HttpError) as refused:
        offered(**fields)
    assert refused.value.status == 400 and refused.value.param == "tool_choice"
