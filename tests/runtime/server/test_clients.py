"""The API with independent clients: the official openai client, and schemathesis over the OpenAPI document (RELIABILITY
S7)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from sizes import size_of
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from .conftest import HERE, Served, StartServer
from .test_responses import ask_over
from .test_structured import TOOLS

pytestmark = pytest.mark.slow


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_openai_completions(served: Served, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="a", max_tokens=4, logprobs=2, n=2, stop=["zz"], seed=1)
    assert [choice.text for choice in answer.choices] == ["bcde", "bcde"] and answer.usage is not None
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens == list("bcde")
    options = {"include_usage": True}
    chunks = list(client.completions.create(model="toy", prompt="a", max_tokens=4, stream=True, stream_options=options))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "bcde"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4


def test_openai_chat(served: Served, client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
    answer = client.chat.completions.create(
        model="toy", messages=messages, max_completion_tokens=3, logprobs=True, top_logprobs=1, temperature=0, user="me"
    )
    assert answer.choices[0].message.content == "\x0b\x0c\r" and answer.choices[0].finish_reason == "length"
    more = {"stop_token_ids": [13]}
    with client.chat.completions.stream(model="toy", messages=messages, max_tokens=9, extra_body=more) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "\x0b\x0c"  # token 13 is not shown


def test_openai_tools_and_their_results(served: Served, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "x"}]
    fields = {"model": "toy", "tools": TOOLS, "max_tokens": 200, "temperature": 30, "seed": 2}
    answer = client.chat.completions.create(messages=messages, tool_choice="required", **fields)
    message = answer.choices[0].message
    assert message.tool_calls and json.loads(message.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")
    messages += [message, {"role": "tool", "content": "rain", "tool_call_id": message.tool_calls[0].id}]
    assert client.chat.completions.create(messages=messages, **fields).choices[0].finish_reason in ("length", "stop")


def test_openai_structured_output(served: Served, client: openai.OpenAI) -> None:
    from typing import Literal

    import pydantic

    class Pet(pydantic.BaseModel):
        kind: Literal["cat", "dog"]
        lives: Literal[7, 9]

    answer = client.chat.completions.parse(
        model="toy", messages=[{"role": "user", "content": "x"}], response_format=Pet, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, Pet)


def test_openai_errors_have_their_classes(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="toy", prompt="a", max_tokens=-1)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_openai_models_and_the_async_client(served: Served, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]

    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as asynchronous:
            asked = [asynchronous.completions.create(model="toy", prompt=c, max_tokens=2) for c in "abcdefgh"]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    assert asyncio.run(several()) == ["bc", "cd", "de", "ef", "fg", "gh", "hi", "ij"]


def test_openai_says_what_key_is_missing(start: StartServer) -> None:
    server = start(key="a-key-of-some-length")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()
    assert openai.OpenAI(base_url=f"{server.url}/v1", api_key="a-key-of-some-length").models.list().data

    url = f"ws://127.0.0.1:{server.port}/v1/responses"  # the same over a WebSocket, which any web page could open
    key = {"Authorization": "Bearer a-key-of-some-length"}
    for headers, origin, status in (({}, None, 401), (key, "http://elsewhere.example", 403)):
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers=headers, origin=origin)
        assert refused.value.response.status_code == status
    with connect(url, additional_headers=key, origin=server.url) as socket:
        assert ask_over(socket, input="x")[-1]["type"] == "response.incomplete"


def test_schemathesis_positive_and_negative(
    start: StartServer, write_engine, tmp_path: Path, chat_engine: Path
) -> None:
    """All operations, phases and checks by default; schemathesis_formats.py selects the cases and generates the
    texts."""
    files = {"tokenizer_config.json": (chat_engine / "tokenizer" / "tokenizer_config.json").read_text()}
    limits = {"max_seq_len": 1 << 18, "max_batch_size": 4, "max_step_tokens": 512}  # values that the schema allows fit
    key = "a-key-of-some-length"
    engine = write_engine(tmp_path / "toy.engine", tokenizer_files=files, **limits)
    server = start("--batch-store", str(tmp_path / "batches.db"), "--max-seconds", "0.02", engine=engine, key=key)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    command += ["-H", f"Authorization: Bearer {key}", "--seed", "1", "--no-shrink", "--continue-on-failure"]
    for counting in ("/v1/responses/input_tokens", "/v1/messages/count_tokens"):  # checked beyond the schema
        command += ["--exclude-path", counting]
    command += ["--max-examples", str(size_of("schemathesis_examples")), "--request-timeout", "60"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(HERE / "schemathesis_formats.py")}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " 0 generated" not in done.stdout
    server.wait_until(server.idle)
    assert server.metric("icc:engine_restarts_total") == 0
    assert "Traceback" not in server.log.read_text()
