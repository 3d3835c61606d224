"""/v1/embeddings of an engine that embeds: the toy, whose hidden states are unit vectors times ten."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from icc.runtime.format.manifest import EmbeddingFacts
from sizes import size_of

from .conftest import HERE, Served, StartServer, running, serve_command

VOCAB = 258


@pytest.fixture(scope="module")
def embedder(write_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of an engine that pools by an unscaled mean, and so counts the bytes that follow those of the text."""
    folder = tmp_path_factory.mktemp("embedder")
    facts = EmbeddingFacts("mean", False, VOCAB, prompts={"query": "q: ", "answer": "a"})
    engine = write_engine(folder / "toy.engine", embedding=facts, max_seq_len=64, max_step_tokens=16)
    command = serve_command(engine, "--max-queue", "40", "--batch-store", str(folder / "batches.db"))
    with running(command, folder / "log", "toy") as server:
        yield server


def vector(text: str) -> np.ndarray:
    """The toy's vector of a text, float32 [VOCAB]: the mean of rows that are 10 at the byte after the token's byte,
    else 0."""
    return 10 * np.bincount([ord(c) + 1 for c in text], minlength=VOCAB).astype(np.float32) / np.float32(len(text))


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_openai_client_gets_its_vectors(embedder: Served) -> None:
    """By default the client asks for base64. Texts and token ids, one and many, longer than a step."""
    client = client_of(embedder)
    texts = ["abc", "a" * 40, "xyzzy"]
    for given in (texts, [list(text.encode()) for text in texts]):
        answer = client.embeddings.create(model="toy", input=given, user="me")
        assert [item.index for item in answer.data] == [0, 1, 2] and answer.model == "toy"
        np.testing.assert_allclose([item.embedding for item in answer.data], [vector(t) for t in texts], rtol=1e-6)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 48
    for one in ("abc", [97, 98, 99]):
        [item] = client.embeddings.create(model="toy", input=one, encoding_format="float").data
        np.testing.assert_allclose(item.embedding, vector("abc"), rtol=1e-6)


def test_clients_of_text_embeddings_inference_get_arrays(embedder: Served) -> None:
    plain = embedder.ask("POST", "/embed", {"inputs": ["abc", "xyzzy"], "normalize": False, "truncate": True}).json
    np.testing.assert_allclose(plain, [vector("abc"), vector("xyzzy")], rtol=1e-6)
    [one] = embedder.ask("POST", "/embed", {"inputs": "abc"}).json
    np.testing.assert_allclose(one, vector("abc") / np.linalg.norm(vector("abc")), rtol=1e-6)
    refused = embedder.ask("POST", "/embed", {"inputs": "a" * 70})
    assert refused.status == 400 and "64" in refused.json["error"]["message"]


def test_shorter_vectors_have_length_one(embedder: Served) -> None:
    [item] = client_of(embedder).embeddings.create(model="toy", input="abz", dimensions=100).data
    np.testing.assert_allclose(item.embedding, (vector("abz") / np.sqrt(200 / 9))[:100], rtol=1e-6)
    [whole] = client_of(embedder).embeddings.create(model="toy", input="abz", dimensions=VOCAB).data
    np.testing.assert_allclose(whole.embedding, vector("abz"), rtol=1e-6)


def test_base64_is_little_endian_float32(embedder: Served) -> None:
    body = {"model": "toy", "input": "q", "encoding_format": "base64"}
    reply = embedder.ask("POST", "/v1/embeddings", body).json
    assert reply["object"] == "list" and reply["data"][0]["object"] == "embedding"
    raw = base64.b64decode(reply["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(raw, dtype="<f4"), vector("q"))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt_name": "query"}, "q: abc"),
        ({"prompt_name": "answer"}, "aabc"),
        ({"prompt": "x", "prompt_name": "query"}, "xabc"),
        ({"input_type": "search_query"}, "q: abc"),
        ({"task": "retrieval.passage"}, "abc"),
        ({"input": [97, 98, 99], "prompt_name": "query"}, "abc"),
        ({"input": "ab" + "z" * 90, "truncate": True}, "ab" + "z" * 62),
        ({"input": "z" * 90 + "ab", "truncate": "START"}, "z" * 62 + "ab"),
        ({"input": "abcdef", "truncate_prompt_tokens": 2}, "ab"),
        ({"input": "z" * 90, "truncate_prompt_tokens": -1}, "z"),
    ],
)
def test_prompts_and_texts_that_are_too_long(embedder: Served, fields: dict, text: str) -> None:
    reply = embedder.ask("POST", "/v1/embeddings", {"model": "toy", "input": "abc", **fields}).json
    np.testing.assert_allclose(reply["data"][0]["embedding"], vector(text), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "a", "prompt_name": "nothing"}, "prompt_name"),
        ({"input": [97], "prompt_name": "nothing"}, "prompt_name"),
        ({"input": "a", "prompt": "x", "input_type": "nothing"}, "input_type"),
        ({"input": "a", "prompt_name": "query", "task": "nothing"}, "task"),
        ({"input": "a", "truncate": "MIDDLE"}, "truncate"),
        ({"input": "a" * 65}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": [300]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": VOCAB + 1}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "n": 1}, "n"),
    ],
)
def test_what_is_wrong_is_said(embedder: Served, fields: dict, param: str) -> None:
    reply = embedder.ask("POST", "/v1/embeddings", {"model": "toy", **fields})
    assert reply.status == 400 and reply.json["error"]["param"] == param, reply.raw


def test_each_task_refuses_the_other(embedder: Served, served: Served) -> None:
    for server, path in (
        (embedder, "/v1/completions"),
        (embedder, "/v1/chat/completions"),
        (served, "/v1/embeddings"),
    ):
        reply = server.ask("POST", path, {"model": "toy", "prompt": "a"})
        assert reply.status == 404 and "compiled for embeddings" in reply.json["error"]["message"]
        assert path not in server.ask("GET", "/openapi.json").json["paths"]
    assert [model.id for model in client_of(embedder).models.list()] == ["toy"]


def test_the_queue_is_bounded_and_a_deadline_ends_a_request(embedder: Served) -> None:
    ask = lambda **fields: embedder.ask("POST", "/v1/embeddings", {"model": "toy", **fields})  # noqa: E731
    refused = ask(input=["a"] * 45)
    assert refused.status == 429 and refused.json["error"]["code"] == "too_expensive"
    late = ask(input=["a" * 60] * 40, deadline=0.001)
    assert late.status == 504 and late.json["error"]["code"] == "deadline"
    embedder.wait_until(embedder.idle)


def test_many_clients_at_once_and_their_metrics(embedder: Served) -> None:
    names = ("icc:prompt_tokens_total", "icc:e2e_request_latency_seconds_count")
    before = [embedder.metric(name) for name in names]

    async def several() -> None:
        async with openai.AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="none") as client:
            texts = [chr(97 + i) * (i + 1) for i in range(16)]
            answers = await asyncio.gather(*[client.embeddings.create(model="toy", input=text) for text in texts])
            for text, answer in zip(texts, answers, strict=True):
                np.testing.assert_allclose(answer.data[0].embedding, vector(text), rtol=1e-6)

    asyncio.run(several())
    assert [embedder.metric(name) - b for name, b in zip(names, before, strict=True)] == [136, 16]
    assert "time_to_first_token" not in embedder.ask("GET", "/metrics").raw.decode()
    embedder.wait_until(embedder.idle)


def test_a_client_that_goes_leaves_nothing(embedder: Served) -> None:
    import http.client

    for _ in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", embedder.port)
        connection.request("POST", "/v1/embeddings", json.dumps({"model": "toy", "input": ["a" * 60] * 40}))
        connection.close()
    embedder.wait_until(embedder.idle)
    assert embedder.metric("icc:engine_restarts_total") == 0


def test_a_batch_of_embeddings(embedder: Served) -> None:
    client = client_of(embedder)
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": {"model": "toy", "input": text}}
        for i, text in enumerate(("ab", "cd"))
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    source = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=source.id, endpoint="/v1/embeddings", completion_window="24h")
    embedder.wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    results = {r["custom_id"]: r for r in map(json.loads, client.files.content(output).text.splitlines())}
    np.testing.assert_allclose(results["1"]["response"]["body"]["data"][0]["embedding"], vector("cd"), rtol=1e-6)


def test_a_key_is_asked_for_and_schemathesis(
    start: StartServer, write_engine: Callable[..., Path], tmp_path: Path
) -> None:
    """One server for both: it pools by the last token, so that prefixes are shared under one key. Schemathesis tries
    the operation that other engines lack; test_clients.py has it try the others."""
    limits = {"max_seq_len": 1 << 18, "max_batch_size": 16, "max_step_tokens": 512}  # values that the schema allows fit
    engine = write_engine(tmp_path / "toy.engine", embedding=EmbeddingFacts("last", True, VOCAB), **limits)
    key = "a-key-of-some-length"
    server = start("--max-seconds", "0.5", engine=engine, key=key)
    body = {"model": "toy", "input": "a" * 40}
    assert server.ask("POST", "/v1/embeddings", body, {"Authorization": "Bearer wrong"}).status == 401
    for _ in range(2):
        found = server.ask("POST", "/v1/embeddings", body).json["data"][0]["embedding"]
        assert found == [float(i == ord("b")) for i in range(VOCAB)]
    assert server.metric("icc:prefix_cache_hits_total") >= 36

    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    command += [
        "-H",
        f"Authorization: Bearer {key}",
        "--max-examples",
        str(size_of("schemathesis_examples")),
        "--seed",
        "1",
        "--no-shrink",
    ]
    command += ["--include-path", "/v1/embeddings", "--continue-on-failure"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(HERE / "schemathesis_formats.py")}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "0 generated" not in done.stdout
    server.wait_until(server.idle)
    assert server.metric("icc:engine_restarts_total") == 0 and "Traceback" not in server.log.read_text()
