"""Ollama's API, by Ollama's own Python client where it is installed, and by hand."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from icc.runtime.format.manifest import EmbeddingFacts
from icc.runtime.server.api.errors import HttpError
from icc.runtime.server.api.model import open_model
from icc.runtime.server.api.ollama.convert import chat_request, prompt_request
from icc.runtime.server.api.ollama.request import OllamaChatRequest, OllamaGenerateRequest

from .conftest import Served, StartServer

ollama = pytest.importorskip("ollama")
USER = {"role": "user", "content": "x"}
SAID = "\x0b\x0c\r"  # the bytes after a newline, the prompt's last byte
SHORT = {"num_predict": 3, "temperature": 0}
VOCAB = 258


@pytest.fixture
def client(served: Served) -> Any:
    return ollama.Client(host=served.url)


def weather(city: str) -> str:
    """Say how the weather is.

    Args:
      city: where
    """
    return f"rain in {city}"


# -- conversations and prompts -----------------------------------------------------------------------------------------


def test_a_chat_is_answered_whole_and_in_lines(client: Any) -> None:
    whole = client.chat("toy", [USER], options=SHORT)
    assert whole.message.content == SAID and whole.message.role == "assistant"
    assert whole.done and whole.done_reason == "length" and whole.model == "toy"
    assert whole.eval_count == 3 and whole.prompt_eval_count > 3
    assert whole.total_duration >= whole.prompt_eval_duration + whole.eval_duration > 0  # nanoseconds
    assert whole.total_duration < 60e9 and whole.load_duration == 0
    lines = list(client.chat("toy", [USER], options=SHORT, stream=True))
    assert "".join(line.message.content for line in lines) == SAID
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count == 3 and lines[0].eval_count is None


def test_a_prompt_is_what_a_user_says_or_a_text_to_complete(client: Any, served: Served) -> None:
    said = client.generate("toy", "x", system="s", options=SHORT)
    assert said.response == SAID and said.done_reason == "length"
    chat = client.chat("toy", [{"role": "system", "content": "s"}, USER], options=SHORT)
    assert said.prompt_eval_count == chat.prompt_eval_count
    raw = client.generate("toy", "a", raw=True, options=SHORT)
    assert raw.response == "bcd" and raw.prompt_eval_count == 1
    lines = list(client.generate("toy", "a", raw=True, options=SHORT, stream=True))
    assert "".join(line.response for line in lines) == "bcd" and lines[-1].done
    endless = client.generate("toy", "a", raw=True, options={"num_predict": -1, "stop": ["k"]})
    assert endless.response == "bcdefghij" and endless.done_reason == "stop"


def test_lines_are_json_and_come_unless_they_are_refused(served: Served) -> None:
    body = {"model": "toy", "messages": [USER], "options": SHORT}
    reply = served.ask("POST", "/api/chat", body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.raw.splitlines()]
    assert lines[-1]["done"] and "".join(line["message"]["content"] for line in lines) == SAID
    whole = served.ask("POST", "/api/chat", {**body, "stream": False})
    assert whole.headers["content-type"] == "application/json" and whole.json["message"]["content"] == SAID


def test_the_asynchronous_client(served: Served) -> None:
    async def several() -> tuple[list[str], str]:
        client = ollama.AsyncClient(host=served.url)
        asked = [client.generate("toy", char, raw=True, options=SHORT) for char in "abcd"]
        whole = [answer.response for answer in await asyncio.gather(*asked)]
        lines = await client.chat("toy", [USER], options=SHORT, stream=True)
        streamed = "".join([line.message.content async for line in lines])
        await client.close()
        return whole, streamed

    assert asyncio.run(several()) == (["bcd", "cde", "def", "efg"], SAID)


def test_options_are_those_of_the_sampler(client: Any) -> None:
    def said(**options: Any) -> str:
        return client.generate("toy", "a", raw=True, options={"num_predict": 24, **options}).response

    hot = {"temperature": 50, "seed": 7}
    assert said(**hot) == said(**hot) != said(**{**hot, "seed": 8})
    assert said(**hot, top_k=1) == said(**hot, min_p=0.99) == said(**hot, top_p=0.0) == said(temperature=0)
    assert said(temperature=0, presence_penalty=2.0) == "bcdefghijklmnopqrstuvwxy"
    assert said(temperature=0, repeat_penalty=1.1, repeat_last_n=-1, num_ctx=4096, num_gpu=99, use_mmap=True)


def test_what_is_not_given_is_sampled_as_ollama_does(chat_engine: Path, tmp_path: Path, write_engine: Any) -> None:
    body = {"model": "toy", "messages": [USER]}
    greedy = open_model(chat_engine)  # the model's own default is temperature 0
    asked = chat_request(msgspec.convert(body, OllamaChatRequest), greedy)
    assert asked.temperature == 0 and asked.top_k is None
    silent = open_model(write_engine(tmp_path / "toy.engine"))
    asked = chat_request(msgspec.convert({**body, "options": {"top_k": 7}}, OllamaChatRequest), silent)
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.8, 7, 0.95)


def test_formats(client: Any) -> None:
    schema = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"]}
    schema["additionalProperties"] = False
    found = client.chat("toy", [USER], format=schema, options={"num_predict": 100})
    assert json.loads(found.message.content)["kind"] in ("cat", "dog")
    found = client.generate("toy", "x", format="json", options={"temperature": 30, "seed": 1, "num_predict": 400})
    assert found.response.lstrip().startswith("{")


def test_probabilities(client: Any) -> None:
    expected = 10 - math.log(math.exp(10) + 257)  # the toy's logits are 10 for the next token and 0 for 257 others
    chat = client.chat("toy", [USER], options=SHORT, logprobs=True, top_logprobs=2)
    raw = client.generate("toy", "a", raw=True, options=SHORT, logprobs=True, top_logprobs=2)
    lines = list(client.chat("toy", [USER], options=SHORT, logprobs=True, stream=True))
    streamed = [one for line in lines for one in line.logprobs or ()]
    for found in (chat.logprobs, raw.logprobs, streamed):
        assert [one.logprob for one in found] == pytest.approx([expected] * 3, abs=1e-4)
    assert [one.token for one in raw.logprobs] == list("bcd") and len(raw.logprobs[0].top_logprobs) == 2


def test_a_request_for_nothing_says_that_the_model_is_there(client: Any) -> None:
    for keep in (0, "10m", -1, "1h30m"):
        assert client.generate("toy", "", keep_alive=keep).done_reason == "load"
        found = client.chat("toy", [], keep_alive=keep)
        assert found.done_reason == "load" and found.message.content == "" and found.done
    with pytest.raises(ollama.ResponseError, match="keep_alive"):
        client.generate("toy", "", keep_alive="soon")


# -- tools -------------------------------------------------------------------------------------------------------------


def test_tools_are_called_and_their_results_given(scripted: Served) -> None:
    client = ollama.Client(host=scripted.url)
    messages: list[Any] = [USER]
    answer = client.chat("scripted", messages, tools=[weather])
    [call] = answer.message.tool_calls
    assert call.function.name == "weather" and call.function.arguments == {"city": "Oslo"}
    assert answer.done_reason == "stop" and not answer.message.content
    lines = list(client.chat("scripted", messages, tools=[weather], stream=True))
    [streamed] = [call for line in lines for call in line.message.tool_calls or ()]
    assert streamed.function.arguments == {"city": "Oslo"} and lines[-1].done
    result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
    messages += [answer.message, result]
    assert client.chat("scripted", messages, tools=[weather]).message.content == "Hello there, friend."


def test_results_belong_to_the_calls_of_their_names(chat_engine: Path) -> None:
    model = open_model(chat_engine)
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("f", "g", "f")]
    results = [{"role": "tool", "content": str(at), "tool_name": name} for at, name in enumerate(("g", "f", "f"))]
    turns = [USER, {"role": "assistant", "thinking": "t", "tool_calls": calls}, *results]
    body = msgspec.convert({"model": "toy", "messages": turns}, OllamaChatRequest)
    _, called, *answered = chat_request(body, model).messages
    ids = [call.id for call in called.tool_calls or ()]
    assert len(set(ids)) == 3 and called.reasoning_content == "t"
    assert [message.tool_call_id for message in answered] == [ids[1], ids[0], ids[2]]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"options": {"nonsense": 1}}, "options.*nonsense"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"num_ctx": 4097}}, "compiled for 4096 tokens of context, not 4097"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "acts on all tokens"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"messages": [{**USER, "images": ["aGk="]}]}, r"messages\[0\].images: this model reads text"),
        ({"think": True}, "'toy' does not support thinking"),
        ({"think": "high"}, "does not support thinking"),
        ({"format": "yaml"}, "format"),
        ({"nonsense": 1}, "nonsense"),
        ({"model": "other"}, "'other' does not exist"),
        ({"truncate": True}, "too long are refused"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(served: Served, body: dict[str, Any], words: str) -> None:
    reply = served.ask("POST", "/api/chat", {"model": "toy", "messages": [USER], **body})
    assert reply.status == (404 if "model" in body else 400)
    assert re.search(words, reply.json["error"]), reply.json


def test_prompts_are_refused_by_name(chat_engine: Path) -> None:
    model = open_model(chat_engine)
    for fields, words in (
        ({"images": ["aGk="]}, "takes no image"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1]}, "/api/chat"),
        ({"raw": True, "system": "s"}, "system"),
    ):
        body = msgspec.convert({"model": "toy", "prompt": "x", **fields}, OllamaGenerateRequest)
        with pytest.raises(HttpError, match=words):
            prompt_request(body, model)


def test_errors_have_ollamas_form(served: Served, client: Any, start: StartServer) -> None:
    with pytest.raises(ollama.ResponseError) as unknown:
        client.chat("other", [USER])
    assert unknown.value.status_code == 404 and "does not exist" in unknown.value.error
    for name in ("pull", "copy"):
        reply = served.ask("POST", f"/api/{name}", {"model": "toy"})
        assert reply.status == 404 and "icc compile" in reply.json["error"]
    assert (
        served.ask("POST", "/api/embed", {"input": "a"}).json["error"] == "this engine was not compiled for embeddings"
    )
    locked = start(key="a-key-of-some-length")
    with pytest.raises(ollama.ResponseError) as refused:
        ollama.Client(host=locked.url).list()
    assert refused.value.status_code == 401 and "API key" in refused.value.error
    held = ollama.Client(host=locked.url, headers={"Authorization": "Bearer a-key-of-some-length"})
    assert [model.model for model in held.list().models] == ["toy"]


def test_a_stream_that_fails_says_so_in_a_line(start_faulty: Callable[..., Served]) -> None:
    client = ollama.Client(host=start_faulty("stages").url)
    said = []
    with pytest.raises(ollama.ResponseError, match="the model failed on this request"):
        for line in client.generate("toy", "N", raw=True, options={"num_predict": 9, "temperature": 0}, stream=True):
            said.append(line.response)
    assert said[0] == "O"  # the answer had begun


# -- models ------------------------------------------------------------------------------------------------------------


def test_the_model_is_listed_shown_and_running(client: Any, served: Served, chat_engine: Path) -> None:
    [listed] = client.list().models
    assert listed.model == "toy" and listed.size > 1000 and len(listed.digest) == 64
    assert listed.details.format == "icc" and listed.details.quantization_level
    shown = client.show("toy")
    assert shown.capabilities == ["completion", "tools"] and "im_start" in shown.template
    kind = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{kind}.context_length"] == 4096 and shown.parameters == "temperature 0"
    [running] = client.ps().models
    assert running.model == "toy" and running.context_length == 4096 and running.size_vram == 0
    assert served.ask("GET", "/api/version").json == {"version": "0.13.0"}
    assert client.generate("toy:latest", "a", raw=True, options=SHORT).model == "toy"
    assert served.ask("POST", "/api/show", {"name": "toy:latest"}).status == 200
    assert served.ask("POST", "/api/show", {"model": "other"}).status == 404


def test_vectors(start: StartServer, write_engine: Callable[..., Path], tmp_path: Path) -> None:
    facts = EmbeddingFacts("mean", False, VOCAB)
    engine = write_engine(
        tmp_path / "toy.engine", embedding=facts, max_seq_len=64, max_batch_size=4, max_step_tokens=64
    )
    client = ollama.Client(host=start(engine=engine).url)
    found = client.embed("toy", ["ab", "cd"])
    assert [sum(x * x for x in vector) for vector in found.embeddings] == pytest.approx([1, 1])
    assert found.prompt_eval_count == 4 and found.total_duration > 0 and found.model == "toy"
    assert [i for i, x in enumerate(found.embeddings[0]) if x] == [ord("b"), ord("c")]
    assert client.embed("toy", "ab").embeddings == [found.embeddings[0]]
    assert len(client.embed("toy", "ab", dimensions=100).embeddings[0]) == 100
    for nothing in ("", []):  # clients load a model by an empty request
        assert client.embed("toy", nothing).embeddings == [] == client.embeddings("toy", "").embedding
    plain = client.embeddings("toy", "ab").embedding
    assert [plain[ord("b")], plain[ord("c")]] == [5, 5]  # unscaled, as from the model
    assert client.embed("toy", "a" * 200).prompt_eval_count == 64  # truncated by default
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.embed("toy", "a" * 200, truncate=False)
    assert client.show("toy").capabilities == ["embedding"]
    with pytest.raises(ollama.ResponseError, match="embeddings"):
        client.chat("toy", [USER])
