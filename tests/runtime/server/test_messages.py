"""/v1/messages, by Anthropic's own client and by hand, on a model that counts: byte b is followed by b + 1."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import msgspec
import pytest
from icc.runtime.server.api.anthropic.chat import chat_request
from icc.runtime.server.api.anthropic.request import MessagesRequest
from icc.runtime.server.api.decoding import decode

from .conftest import Served, StartServer
from .test_structured import TOOLS

pytestmark = pytest.mark.usefixtures("idle_after")
FUNCTION = TOOLS[0]["function"]
TOOL = {"name": FUNCTION["name"], "description": "d", "input_schema": FUNCTION["parameters"]}
USER = {"role": "user", "content": "x"}
SAID = "\x0b\x0c\r"  # the bytes after a newline, the prompt's last byte


@pytest.fixture
def client(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def test_a_message_is_answered(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="toy", max_tokens=3, system="s", messages=[USER])
    assert [block.text for block in answer.content] == [SAID]
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 3
    blocks = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
    again = client.messages.create(model="toy", max_tokens=3, system=blocks, messages=[USER])
    whole = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == whole
    assert again.usage.cache_read_input_tokens > 0


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    stops = ["zz", "\x0d"]
    answer = client.messages.create(model="toy", max_tokens=9, stop_sequences=stops, messages=[USER])
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == "\x0d"
    assert answer.content[0].text == "\x0b\x0c"
    with client.messages.stream(model="toy", max_tokens=9, stop_sequences=stops, messages=[USER]) as stream:
        assert stream.get_final_message().stop_sequence == "\x0d"


def test_events_come_in_their_order(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(model="toy", max_tokens=4, messages=[USER], stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert [kind for kind in kinds if kind != "ping"] == [
        "message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0].message.content == [] and events[0].message.usage.output_tokens == 0
    assert events[-2].usage.output_tokens == 4 and events[-2].delta.stop_reason == "max_tokens"
    with client.messages.stream(model="toy", max_tokens=4, messages=[USER]) as stream:
        assert "".join(stream.text_stream) == SAID + "\x0e"


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": FUNCTION["name"]}]
)
def test_a_tool_is_used_and_its_result_given(client: anthropic.Anthropic, choice: dict[str, Any]) -> None:
    fields = {"model": "toy", "max_tokens": 200, "tools": [TOOL], "extra_body": {"temperature": 30, "seed": 2}}
    with client.messages.stream(messages=[USER], tool_choice=choice, **fields) as stream:
        message = stream.get_final_message()
    [use] = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use" and use.name == FUNCTION["name"] and use.input["city"] in ("Oslo", "Rome")
    whole = client.messages.create(messages=[USER], tool_choice=choice, **fields)
    assert whole.content[0].input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
    turns = [USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=turns, **fields).stop_reason in ("end_turn", "max_tokens", "tool_use")


def test_models_are_listed_as_the_client_reads_them(client: anthropic.Anthropic) -> None:
    [listed] = client.models.list()
    assert listed == client.models.retrieve("toy") and listed.type == "model"
    assert listed.display_name == "toy" and listed.created_at.timestamp() > 1.7e9 and listed.max_input_tokens


def test_tokens_are_counted(client: anthropic.Anthropic, served: Served) -> None:
    counted = client.messages.count_tokens(model="toy", messages=[USER]).input_tokens
    assert counted == served.chat("x", max_tokens=1)["usage"]["prompt_tokens"]
    assert client.messages.count_tokens(model="toy", messages=[USER], tools=[TOOL]).input_tokens > counted


def test_errors_have_anthropics_form(served: Served, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="other", max_tokens=1, messages=[USER])
    assert unknown.value.type == "not_found_error" and unknown.value.request_id
    image = {"type": "image", "source": {"type": "url", "url": "x"}}
    for fields in ({"max_tokens": 0}, {"nonsense": 1}, {"messages": [{"role": "user", "content": [image]}]}):
        body = {"model": "toy", "max_tokens": 1, "messages": [USER], **fields}
        reply = served.ask("POST", "/v1/messages", body, {"X-Request-Id": "mine"})
        assert reply.status == 400 and reply.json["type"] == "error" and reply.json["request_id"] == "mine"
        assert reply.json["error"]["type"] == "invalid_request_error" and reply.headers["request-id"] == "mine"


def test_the_key_is_where_anthropics_client_puts_it(start: StartServer) -> None:
    server = start(key="a-key-of-some-length")
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="wrong").messages.count_tokens(model="toy", messages=[USER])
    right = anthropic.Anthropic(base_url=server.url, api_key="a-key-of-some-length")
    assert right.messages.count_tokens(model="toy", messages=[USER]).input_tokens


# -- pure --------------------------------------------------------------------------------------------------------------


def chat_of(**fields) -> dict:
    body = {"model": "m", "max_tokens": 1, "messages": [USER], **fields}
    return msgspec.to_builtins(chat_request(decode(json.dumps(body).encode(), MessagesRequest)))


def test_blocks_become_messages() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "r", "is_error": True},
                {"type": "text", "text": "d"},
            ],
        },
    ]
    messages = chat_of(system="s", messages=turns)["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "user"]
    assert [message["content"] for message in messages] == ["s", "ab", "c", "Error: r", "d"]
    assert messages[2]["reasoning_content"] == "t"
    assert messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}


def test_choices_and_thinking_are_chats() -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    assert chat_of(tools=tools, tool_choice={"type": "any"})["tool_choice"] == "required"
    assert chat_of(tools=tools, tool_choice={"type": "none"})["tool_choice"] == "none"
    chosen = chat_of(tools=tools, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert chosen["tool_choice"] == "auto" and chosen["parallel_tool_calls"] is False
    for kind, wanted in (("enabled", True), ("disabled", False)):
        assert chat_of(thinking={"type": kind})["chat_template_kwargs"] == {"enable_thinking": wanted}
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    config = chat_of(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert config["response_format"]["json_schema"]["schema"] == schema
