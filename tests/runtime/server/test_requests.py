"""Requests of clients: fields of OpenAI and of vLLM, agent loops with tools, limits in words."""

from __future__ import annotations

import json
import re
import socket
import statistics
from typing import Any, Literal

import openai
import pydantic
import pytest
from icc.runtime.errors import UsageError
from icc.runtime.templates.source import read_template_file

from .call_templates import QWEN_3
from .conftest import Served, StartServer

pytestmark = pytest.mark.usefixtures("idle_after")
SAMPLED = {"temperature": 30, "seed": 2, "max_tokens": 400}


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def refused(served: Served, **body: Any) -> dict[str, Any]:
    """The error of a request, which must be refused with 400."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = served.ask("POST", path, {"model": "toy", **body})
    assert reply.status == 400, reply.raw
    return reply.json["error"]


# -- tools -----------------------------------------------------------------------------------------------------------


class Place(pydantic.BaseModel):
    name: Literal["Oslo", "Rome"]


class Trip(pydantic.BaseModel):
    """A trip."""

    first: Place
    second: Place


def test_an_agent_loop_with_nested_models(served: Served, client: openai.OpenAI) -> None:
    """The schema of a tool with a nested model has $defs; the answer is sent back as the client dumps it."""
    messages: list[Any] = [{"role": "user", "content": "x"}]
    fields = {"model": "toy", "tools": [openai.pydantic_function_tool(Trip)], **SAMPLED}
    for _ in range(2):
        answer = client.chat.completions.parse(
            messages=messages, tool_choice="required", parallel_tool_calls=False, **fields
        )
        [call] = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Trip)
        assert answer.choices[0].finish_reason == "tool_calls"
        replayed = answer.choices[0].message.model_dump()
        replayed["tool_calls"][0]["function"].pop("parsed_arguments")
        assert {"refusal", "annotations", "audio", "function_call"} <= set(replayed)
        messages += [
            replayed | {"provider_specific_fields": {"x": 1}},
            {"role": "tool", "content": "ok", "tool_call_id": call.id},
        ]


def test_one_call_or_several(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"enum": [{}]}}}]
    counts = set()
    for seed in range(4):
        fields = {"tools": tools, "tool_choice": "required", **SAMPLED, "seed": seed, "max_tokens": 2000}
        [choice] = served.chat("x", **fields, parallel_tool_calls=False)["choices"]
        assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
        [choice] = served.chat("x", **fields)["choices"]
        counts.add(len(choice["message"]["tool_calls"]))
    assert max(counts) > 1


def test_functions_are_answered_as_functions(served: Served, client: openai.OpenAI) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}}
    fields = {"model": "toy", "functions": [function], "function_call": {"name": "f"}, **SAMPLED}
    messages: list[Any] = [{"role": "user", "content": "x"}]
    [choice] = client.chat.completions.create(messages=messages, **fields).choices
    called = choice.message.function_call
    assert called is not None and called.name == "f" and json.loads(called.arguments)["a"] == 1
    assert choice.finish_reason == "function_call" and not choice.message.tool_calls
    deltas = [c.choices[0].delta for c in client.chat.completions.create(messages=messages, stream=True, **fields)]
    assert "".join(d.function_call.arguments or "" for d in deltas if d.function_call) == called.arguments
    messages += [choice.message, {"role": "function", "name": "f", "content": "r"}]
    assert client.chat.completions.create(messages=messages, model="toy", max_tokens=1).choices


def test_allowed_tools(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {"enum": [{}]}}} for name in "fgh"]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, **SAMPLED}
    [answer] = served.chat("x", **fields)["choices"]
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["g"]
    assert (
        refused(served, messages=[{"role": "user", "content": "x"}], tool_choice="required")["param"] == "tool_choice"
    )


# -- standard fields -------------------------------------------------------------------------------------------------


def test_standard_fields_change_nothing_or_what_they_say(served: Served, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "prompt_cache_key": "k", "safety_identifier": "s", "verbosity": "low", "modalities": ["text"], "n": None,
        "prediction": {"type": "content", "content": "x"}, "tools": [], "seed": -1,
        "stop": [f"{i:03}" for i in range(20)], "reasoning_effort": "low", "store": False, "metadata": {"a": "b"},
        "audio": None, "web_search_options": None,
    }  # fmt: skip
    answer = served.chat("x", max_tokens=3, temperature=0, **fields)
    assert answer["choices"][0]["message"]["content"] == "\x0b\x0c\r"
    many = served.complete(["a"] * 40, max_tokens=1, temperature=0, suffix=None, best_of=1)
    assert [choice["text"] for choice in many["choices"]] == ["b"] * 40
    wanted = {"type": "json_object", "schema": {"const": {"a": 1}}}
    answer = served.chat("x", response_format=wanted, **SAMPLED)
    assert answer["choices"][0]["message"]["content"] == '{"a":1}'
    assert refused(served, prompt="a", suffix="b")["param"] == "suffix"
    assert (
        refused(served, messages=[{"role": "user", "content": "x"}], modalities=["audio"])["param"] == "modalities[0]"
    )


def test_the_best_of_several(served: Served) -> None:
    fields = {"max_tokens": 4, "temperature": 40, "seed": 3, "logprobs": 0}
    everybody = served.complete("a", n=4, **fields)["choices"]
    best = served.complete("a", n=1, best_of=4, **fields)
    likeliest = max(everybody, key=lambda choice: statistics.mean(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best["choices"]] == [likeliest["text"]]
    assert best["choices"][0]["index"] == 0 and best["usage"]["completion_tokens"] > 8
    assert refused(served, prompt="a", n=3, best_of=2)["param"] == "best_of"


def test_a_prompt_is_scored_without_an_answer(served: Served, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="abz", max_tokens=0, echo=True, logprobs=1)
    [choice] = answer.choices
    assert choice.text == "abz" and choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.tokens == ["a", "b", "z"]
    first, likely, unlikely = choice.logprobs.token_logprobs or []
    assert first is None and likely > unlikely and answer.usage is not None and answer.usage.completion_tokens == 0
    # a prompt that fills the context can be scored, but not continued
    assert served.complete("a" * 4096, max_tokens=0, echo=True)["choices"][0]["text"] == "a" * 4096


@pytest.mark.parametrize("size", [4096, 5000])
def test_a_prompt_that_leaves_no_room_is_refused_as_clients_expect(client: openai.OpenAI, size: int) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="toy", prompt="a" * size)
    assert error.value.code == "context_length_exceeded" and error.value.param == "prompt"
    assert f"maximum context length is 4096 tokens. However, your prompt resulted in {size}" in error.value.message
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "a" * size}])
    assert error.value.code == "context_length_exceeded" and error.value.param == "messages"


def test_logprobs_have_the_bytes_of_parts_of_characters(served: Served) -> None:
    fields = {"max_tokens": 2, "temperature": 0, "logit_bias": {"195": 100}}
    first, _ = served.chat("x", logprobs=True, top_logprobs=1, **fields)["choices"][0]["logprobs"]["content"]
    assert first["bytes"] == [195] and first["token"] == "bytes:\\xc3"
    [choice] = served.complete([97, 0xC3, 0xA9, 98], max_tokens=0, echo=True, logprobs=0)["choices"]
    assert choice["text"] == "aéb" and choice["logprobs"]["text_offset"] == [0, 1, 1, 2]


# -- vLLM's fields ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["yes", 'no "x"']}, 'yes|no "x"'),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"guided_json": '{"const": {"a": 1}}'}, '{"a":1}'),
        ({"guided_grammar": 'root ::= "x" | "y"'}, "x|y"),
        ({"structured_outputs": {"json": {"enum": [7, 8]}}}, "7|8"),
        ({"structured_outputs": {"choice": ["one"]}}, "one"),
        ({"structured_outputs": {"grammar": 'start: "z"'}}, "z"),
        ({"structured_outputs": {"regex": "q+"}, "prompt_logprobs": 0}, "q+"),
    ],
)
def test_guided_answers(served: Served, fields: dict[str, Any], pattern: str) -> None:
    [choice] = served.complete("a", **fields, **SAMPLED)["choices"]
    assert re.fullmatch(pattern, choice["text"]) and choice["finish_reason"] == "stop"


def test_only_one_guide_can_be_given(served: Served) -> None:
    error = refused(served, prompt="a", guided_regex="a", structured_outputs={"choice": ["b"]})
    assert "only one of them" in error["message"] and error["param"] == "guided_regex"
    assert refused(served, prompt="a", guided_json="[")["param"] == "guided_json"


def test_words_and_tokens_that_may_not_come(served: Served) -> None:
    greedy = {"max_tokens": 4, "temperature": 0}
    assert served.complete("a", bad_words=["c"], **greedy)["choices"][0]["text"][:2] != "bc"
    assert served.complete("a", bad_words=["bcde"], **greedy)["choices"][0]["text"][:3] == "bcd"
    assert served.complete("a", bad_words=["bcde"], **greedy)["choices"][0]["text"] != "bcde"
    text = served.complete("a", allowed_token_ids=[120, 121], max_tokens=20, temperature=30)["choices"][0]["text"]
    assert set(text) == {"x", "y"}
    assert refused(served, prompt="a", allowed_token_ids=[300])["param"] == "allowed_token_ids"
    assert "300 is not in the vocabulary" in refused(served, prompt="a", logit_bias={"300": 1})["message"]
    wrong = refused(served, prompt="a", logit_bias={"-1": 1})
    assert wrong["param"] == "logit_bias" and wrong["message"].startswith("logit_bias: a key of it: Expected `str`")


def test_prompts_are_cut_and_scored(served: Served) -> None:
    answer = served.complete("xyzab", truncate_prompt_tokens=2, echo=True, max_tokens=1, temperature=0)
    assert answer["choices"][0]["text"] == "abc" and answer["usage"]["prompt_tokens"] == 2
    answer = served.complete("a" * 5000, truncate_prompt_tokens=-1, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 4095
    scored = served.complete("abz", prompt_logprobs=2, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert scored[0] is None and scored[1]["98"]["rank"] == 1 and scored[1]["98"]["decoded_token"] == "b"
    assert scored[2]["122"]["rank"] is None and len(scored[2]) == 3
    assert len(served.chat("x", prompt_logprobs=0, max_tokens=1)["prompt_logprobs"]) > 10


def test_stops_and_special_tokens_may_be_shown(served: Served) -> None:
    greedy = {"max_tokens": 9, "temperature": 0}
    fields = {"stop": ["de"], "include_stop_str_in_output": True}
    assert served.complete("a", **greedy, **fields)["choices"][0]["text"] == "bcde"
    hidden = {"max_tokens": 2, "temperature": 0, "logit_bias": {"256": 100}}  # <bos>
    assert served.complete("a", **hidden)["choices"][0]["text"] == ""
    assert served.complete("a", skip_special_tokens=False, **hidden)["choices"][0]["text"] == "<bos><bos>"


def test_a_message_is_continued(served: Served) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "abc"}]
    fields = {"max_tokens": 3, "temperature": 0}
    [choice] = served.chat(messages, continue_final_message=True, **fields)["choices"]
    assert choice["message"]["content"] == "def"
    [choice] = served.chat(messages[:1], add_generation_prompt=False, **fields)["choices"]
    assert choice["message"]["content"] == "\x0b\x0c\r"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(served, messages=messages, **both)["param"] == "continue_final_message"
    wrong = refused(served, messages=messages, chat_template_kwargs={"add_generation_prompt": False})
    assert wrong["param"] == "chat_template_kwargs" and "add_generation_prompt is no variable" in wrong["message"]


# -- connections and templates ---------------------------------------------------------------------------------------


def half_closed(served: Served, body: dict[str, Any]) -> socket.socket:
    raw = json.dumps({"model": "toy", "prompt": "a", **body}).encode()
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    sock.shutdown(socket.SHUT_WR)
    return sock


def test_a_half_closed_client_gets_its_answer_and_one_that_goes_is_noticed(served: Served) -> None:
    for stream in (False, True):
        with half_closed(served, {"max_tokens": 3, "temperature": 0, "stream": stream}) as sock:
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200") and b'"text":"b' in answer and b"connection: close" in answer
    half_closed(served, {"max_tokens": 4000, "ignore_eos": True, "n": 16}).close()
    served.wait_until(served.idle)


def test_a_template_is_given_when_the_server_starts(start: StartServer, tmp_path: Any) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(QWEN_3.replace("<|im_start|>", "<s>"))
    server = start("--chat-template", str(file))
    prompt = "<s>user\nx<|im_end|>\n<s>assistant\n"
    assert server.chat("x", max_tokens=1)["usage"]["prompt_tokens"] == len(prompt)
    thinking = server.chat("x", max_tokens=1, chat_template_kwargs={"enable_thinking": False})
    assert thinking["usage"]["prompt_tokens"] == len(prompt + "<think>\n\n</think>\n\n")
    named = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "chat_template": "rag"}
    refused = server.ask("POST", "/v1/chat/completions", named)
    assert refused.status == 400 and "it has default" in refused.json["error"]["message"]
    assert server.chat("x", max_tokens=1, chat_template="default")["usage"]["prompt_tokens"] == len(prompt)
    file.write_text("{% for %}")
    failed = start("--chat-template", str(file), wait=False)
    assert failed.process.wait(20) == 2 and f"--chat-template {file}" in failed.log.read_text()
    for content in (b"\xff", b"x" * (2 << 20)):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="--chat-template"):
            read_template_file(file)
