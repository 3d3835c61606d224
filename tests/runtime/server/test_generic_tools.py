"""Tools with a model whose chat template has none, over HTTP: the model is a script that calls the tools it is
shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .chat_templates import TEMPLATES
from .conftest import HERE, Served, running
from .test_structured import TOOLS

USER = {"role": "user", "content": "x"}
WORDS = "Hello there, friend."
NAME = TOOLS[0]["function"]["name"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "template.jinja").write_text(TEMPLATES["chatml"][0])
    script = str(HERE.parents[2] / "benchmarks" / "clients" / "scripted.py")
    command = [sys.executable, script, str(folder), "0", str(folder / "template.jinja")]
    with running(command, folder / "log", "scripted") as served:
        yield served


def test_a_tool_is_called_and_its_result_given(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    fields: dict[str, Any] = {"model": "scripted", "tools": TOOLS}
    named = {"type": "function", "function": {"name": NAME}}
    for choice in ("auto", "required", named):
        answer = client.chat.completions.create(messages=[USER], tool_choice=choice, **fields).choices[0]
        [call] = answer.message.tool_calls or ()
        assert answer.finish_reason == "tool_calls" and not answer.message.content, choice
        assert call.function.name == NAME and json.loads(call.function.arguments)["city"] == "Oslo"
    none = client.chat.completions.create(messages=[USER], tool_choice="none", **fields)
    assert none.choices[0].message.content == WORDS
    turns = [USER, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    after = client.chat.completions.create(messages=turns, **fields)
    assert after.choices[0].message.content == WORDS and after.choices[0].finish_reason == "stop"


def test_a_call_is_streamed_in_pieces(server: Served) -> None:
    events = server.chat("x", tools=TOOLS, stream=True)
    pieces = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces[0]["function"]["name"] == NAME and len(pieces) > 2
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces))["city"] == "Oslo"
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_other_apis_have_it_too(server: Served) -> None:
    tool = {"name": NAME, "input_schema": TOOLS[0]["function"]["parameters"]}
    body = {"max_tokens": 300, "messages": [USER], "tools": [tool]}
    [block] = server.ask("POST", "/v1/messages", body).json["content"]
    assert block["type"] == "tool_use" and block["input"]["city"] == "Oslo"
    lines = server.ask("POST", "/api/chat", {"messages": [USER], "tools": TOOLS, "stream": False}).json
    assert lines["message"]["tool_calls"][0]["function"]["arguments"]["city"] == "Oslo"
    assert "tools" in server.ask("POST", "/api/show", {}).json["capabilities"]


def test_a_schema_that_no_value_satisfies_is_told_of_the_tools(server: Served) -> None:
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/$defs/none"}}}
    reply = server.ask("POST", "/v1/chat/completions", {"messages": [USER], "tools": [wrong]})
    assert reply.status == 400 and reply.json["error"]["param"] == "tools", reply.raw
