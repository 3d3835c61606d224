"""/v1/responses, by the official client and by hand, on a model that counts: byte b is followed by b + 1."""

from __future__ import annotations

import base64
import json
from typing import Any

import openai
import pytest
from icc.runtime.server.api.decoding import decode
from icc.runtime.server.api.errors import HttpError
from icc.runtime.server.api.openresponses.chat import chat_request, items_of
from icc.runtime.server.api.openresponses.request import ResponsesRequest
from icc.runtime.server.api.openresponses.resource import Response
from icc.runtime.server.api.openresponses.store import ResponseStore
from websockets.sync.client import ClientConnection, connect

from .conftest import Served
from .test_structured import TOOLS

pytestmark = pytest.mark.usefixtures("idle_after")
TOOL = {"type": "function", **TOOLS[0]["function"]}
SAID = "\x0b\x0c\r"  # the bytes after a newline, the prompt's last byte


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_a_text_is_answered(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="toy", input="x", instructions="s", max_output_tokens=3, metadata={"a": "b"})
    assert answer.output_text == SAID and answer.status == "incomplete"
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.output_tokens == 3 and answer.metadata == {"a": "b"}
    assert answer.output[0].id.startswith("msg_") and answer.id.startswith("resp_")
    ended = client.responses.create(model="toy", input="x", extra_body={"stop": "\r"})
    assert ended.status == "completed" and ended.output_text == "\x0b\x0c"


def test_events_come_in_their_order_and_with_numbers(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="toy", input="x", stream=True, extra_body={"stop": "\x10"})
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == "\x0b\x0c\r\x0e\x0f"
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    with client.responses.stream(model="toy", input="x", extra_body={"stop": "\x0e"}) as accumulated:
        assert accumulated.get_final_response().output_text == SAID


def test_a_conversation_is_compacted_and_gone_on_from(served: Served) -> None:
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    said += [{"role": "assistant", "content": "two"}]
    body = {"model": "toy", "input": said, "prompt_cache_key": "k"}
    made = served.ask("POST", "/v1/responses/compact", body).json
    assert made["object"] == "response.compaction" and made["usage"]["output_tokens"] > 0
    kept, summary = made["output"]
    assert kept["role"] == "system" and kept["content"] == [{"type": "input_text", "text": "s"}]
    text = base64.b64decode(summary["encrypted_content"]).decode()
    going_on = {"model": "toy", "input": [kept, summary, {"role": "user", "content": "x"}], "max_output_tokens": 3}
    answer = served.ask("POST", "/v1/responses", going_on).json
    assert answer["output"][0]["content"][0]["text"] == SAID
    request = decode(json.dumps(going_on).encode(), ResponsesRequest)
    first = chat_request(request, items_of(request)).messages[0]
    assert first.content == f"s\n\nSummary of the conversation so far:\n{text}"
    for wrong in (
        {"model": "toy"},
        {"model": "toy", "input": [{**summary, "encrypted_content": "!"}]},
    ):
        assert served.ask("POST", "/v1/responses/compact", wrong).status == 400


def test_images_are_refused_in_words(served: Served) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    content = [{"type": "input_text", "text": "x"}, image]
    reply = served.ask("POST", "/v1/responses", {"model": "toy", "input": [{"role": "user", "content": content}]})
    assert reply.status == 400 and "takes no image" in reply.json["error"]["message"]
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    chat = {"model": "toy", "messages": [{"role": "user", "content": parts}]}
    reply = served.ask("POST", "/v1/chat/completions", chat)
    assert reply.status == 400 and reply.json["error"]["code"] == "unsupported_content"


def ask_over(socket: ClientConnection, **fields: Any) -> list[Any]:
    """The events of one turn over a WebSocket."""
    socket.send(json.dumps({"type": "response.create", "model": "toy", "max_output_tokens": 3, **fields}))
    events: list[Any] = []
    while not events or events[-1]["type"] not in ("error", "response.incomplete", "response.completed"):
        events.append(json.loads(socket.recv(30)))
    return events


def test_responses_over_a_websocket(served: Served) -> None:
    url = f"ws://127.0.0.1:{served.port}/v1/responses"
    with connect(url) as socket:
        first = ask_over(socket, input="x", store=False)
        assert [event["sequence_number"] for event in first] == list(range(len(first)))
        assert (
            first[0]["type"] == "response.created" and first[-1]["response"]["output"][0]["content"][0]["text"] == SAID
        )
        before = first[-1]["response"]["id"]
        assert served.ask("GET", f"/v1/responses/{before}").status == 404  # kept for this connection only
        second = ask_over(socket, input="y", store=False, previous_response_id=before)
        assert second[-1]["response"]["usage"]["input_tokens"] > first[-1]["response"]["usage"]["input_tokens"]
        orphan = [{"type": "function_call_output", "call_id": "none", "output": "1"}]
        assert ask_over(socket, input=orphan, previous_response_id=before)[0]["status"] == 400
        forgotten = ask_over(socket, input="z", previous_response_id=before)[0]
        assert forgotten["error"]["code"] == "previous_response_not_found"
        for wrong in ({"stream": True, "input": "x"}, {"input": 1}, {"input": "x", "model": "other"}):
            assert ask_over(socket, **wrong)[-1]["type"] == "error"
        socket.send("{")
        assert json.loads(socket.recv(30))["error"]["code"] == "invalid_json"
        stored = ask_over(socket, input="x")[-1]["response"]["id"]
    with connect(url) as socket:
        assert ask_over(socket, input="x", previous_response_id=before)[0]["type"] == "error"
        assert ask_over(socket, input="x", previous_response_id=stored)[-1]["type"] == "response.incomplete"
        socket.send(json.dumps({"type": "response.create", "model": "toy", "input": "x", "max_output_tokens": 4000}))
        socket.recv(30)  # then disconnect: the request ends
    served.wait_until(served.idle)


def test_a_tool_is_called_and_its_result_given(client: openai.OpenAI) -> None:
    fields = {"model": "toy", "tools": [TOOL], "max_output_tokens": 200, "temperature": 30, "extra_body": {"seed": 2}}
    first = client.responses.create(input="x", tool_choice="required", parallel_tool_calls=False, **fields)
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome") and call.name == TOOL["name"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    again = client.responses.create(input=[{"role": "user", "content": "x"}, call, result], **fields)
    assert again.status in ("completed", "incomplete")
    kept = client.responses.create(input=[result], previous_response_id=first.id, **fields)
    assert kept.usage is not None and again.usage is not None
    assert kept.usage.input_tokens == again.usage.input_tokens


def test_a_call_is_streamed(client: openai.OpenAI) -> None:
    fields = {"max_output_tokens": 200, "temperature": 30, "extra_body": {"seed": 2}}
    choice = {"type": "function", "name": TOOL["name"]}
    with client.responses.stream(model="toy", input="x", tools=[TOOL], tool_choice=choice, **fields) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    at = kinds.index("response.function_call_arguments.done")
    assert "response.function_call_arguments.delta" in kinds[:at] and kinds[at + 1] == "response.output_item.done"
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == events[at].arguments and json.loads(events[at].arguments)["city"] in ("Oslo", "Rome")
    added = events[kinds.index("response.output_item.added")].item
    assert added.type == "function_call" and added.name == TOOL["name"] and added.status == "in_progress"


def test_structured_output(client: openai.OpenAI) -> None:
    from typing import Literal

    import pydantic

    class Pet(pydantic.BaseModel):
        kind: Literal["cat", "dog"]

    answer = client.responses.parse(model="toy", input="x", text_format=Pet, max_output_tokens=100)
    assert isinstance(answer.output_parsed, Pet)


def test_logprobs_are_given_where_they_are_asked_for(client: openai.OpenAI) -> None:
    include = ["message.output_text.logprobs"]
    answer = client.responses.create(model="toy", input="x", max_output_tokens=2, top_logprobs=2, include=include)
    logprobs = answer.output[0].content[0].logprobs
    assert [entry.token for entry in logprobs] == ["\x0b", "\x0c"] and len(logprobs[0].top_logprobs) == 2


def test_a_stored_response_can_be_got_gone_on_from_and_forgotten(client: openai.OpenAI, served: Served) -> None:
    first = client.responses.create(model="toy", input="x", max_output_tokens=3)
    assert client.responses.retrieve(first.id).output_text == SAID
    assert [item.content[0].text for item in client.responses.input_items.list(first.id)] == ["x"]
    second = client.responses.create(model="toy", input="y", previous_response_id=first.id, max_output_tokens=3)
    whole = [{"role": "user", "content": "x"}, {"role": "assistant", "content": SAID}, {"role": "user", "content": "y"}]
    again = client.responses.create(model="toy", input=whole, max_output_tokens=3)
    assert second.previous_response_id == first.id and second.usage.input_tokens == again.usage.input_tokens
    third = client.responses.create(model="toy", input="z", previous_response_id=second.id, max_output_tokens=1)
    assert third.usage.input_tokens > second.usage.input_tokens
    client.responses.delete(first.id)
    for wrong in (first.id, "resp_unknown"):
        reply = served.ask("POST", "/v1/responses", {"model": "toy", "input": "a", "previous_response_id": wrong})
        assert reply.status == 404 and reply.json["error"]["code"] == "previous_response_not_found"
    unstored = client.responses.create(model="toy", input="x", max_output_tokens=1, store=False)
    assert served.ask("GET", f"/v1/responses/{unstored.id}").status == 404


def test_truncation_drops_turns_from_the_beginning(client: openai.OpenAI) -> None:
    turns = [{"role": "system", "content": "s"}]
    turns += [{"role": role, "content": "a" * 900} for _ in range(3) for role in ("user", "assistant")]
    turns.append({"role": "user", "content": "b"})
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="toy", input=turns, max_output_tokens=1)
    answer = client.responses.create(model="toy", input=turns, max_output_tokens=1, truncation="auto")
    assert answer.usage is not None and 900 < answer.usage.input_tokens < 4096


def test_what_is_not_served_is_refused_by_name(served: Served) -> None:
    base = {"model": "toy", "input": "x"}
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
    for fields, param in [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [image]}, "input[0].content[0].type"),
        ({"input": []}, "input"),
    ]:
        reply = served.ask("POST", "/v1/responses", base | fields)
        assert reply.status == 400 and reply.json["error"]["param"] == param, reply.raw


def test_tokens_are_counted(served: Served) -> None:
    counted = served.ask("POST", "/v1/responses/input_tokens", {"model": "toy", "input": "hello"}).json
    assert counted["input_tokens"] == served.chat("hello", max_tokens=1)["usage"]["prompt_tokens"]


# -- pure --------------------------------------------------------------------------------------------------------------


def chat_of(**fields) -> list[dict]:
    import msgspec

    request = decode(json.dumps({"model": "m", **fields}).encode(), ResponsesRequest)
    return msgspec.to_builtins(chat_request(request, items_of(request)).messages)


def test_what_the_model_did_at_a_stretch_is_one_message() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "status": "completed", "id": "fc"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "s"}]},
        {"role": "developer", "content": "d"},
    ]
    messages = chat_of(input=items, instructions="i")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "developer"]
    assert [called["id"] for called in messages[2]["tool_calls"]] == ["1", "2"] and messages[2]["content"] == "b"
    assert [message["content"] for message in messages[3:5]] == ["r", "s"]


def test_the_store_is_bounded_and_keeps_clients_apart() -> None:
    def response(name: str, text: str) -> Response:
        fields = dict.fromkeys(Response.__struct_fields__)
        return Response(**{**fields, "id": name, "output": [], "instructions": text})  # type: ignore[arg-type]

    size = 1000
    store = ResponseStore(5 * size)
    for number in range(20):
        store.add("a", response(f"r{number}", "x" * (size // 2)), [], 0)
    assert store.find("a", "r19").response.id == "r19"
    for client, name in (("b", "r19"), ("a", "r0")):
        with pytest.raises(HttpError) as error:
            store.find(client, name)
        assert error.value.status == 404
    store.add("a", response("big", "x" * 10 * size), [], 0)  # larger than the store: everything is dropped
    with pytest.raises(HttpError):
        store.find("a", "big")
