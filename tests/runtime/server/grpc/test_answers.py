"""Answers and vectors over gRPC equal those of HTTP, until they end, are aborted or their client is gone."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from icc.runtime.format.manifest import EmbeddingFacts
from icc.runtime.requests.params import SamplingParams
from icc.runtime.server.api.errors import ClientGone
from icc.runtime.server.engine.engine_stream import EngineStream
from icc.runtime.server.engine.messages import Delta, Submit
from icc.runtime.server.grpc.calls import RunningCall, RunningCalls
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from ..conftest import HERE, Served, StartServer, running
from .conftest import Client, chunk_tokens, generate_request

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slow(chat_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Client]]:
    """A server whose steps take 0.2 s; tests leave it idle."""
    command = [sys.executable, str(HERE / "fault_server.py"), str(chat_engine), "slow", '{"grpc_port": 0}']
    with running(command, tmp_path_factory.mktemp("slow") / "log", "toy") as served:
        yield served, Client(served)


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 20},
        {"max_tokens": 20, "temperature": 1.5, "seed": 7},
        {"max_tokens": 12, "temperature": 2.0, "seed": 3, "n": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.001},
        {"max_tokens": 30, "stop": ["jk"]},
        {"max_tokens": 30, "stop_token_ids": [ord("m")]},
        {"max_tokens": 8, "logit_bias": {ord("z"): 100.0}, "repetition_penalty": 1.1, "presence_penalty": 0.5},
        {"max_tokens": 10, "regex": "[0-9]{4}"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
def test_tokens_are_those_of_http(client: Client, server: Served, sampling: dict[str, Any], prompt: Any) -> None:
    """Streamed and not, for texts and token ids. The tokens of completions over HTTP are those of their
    log-probabilities."""
    fields = {**sampling, "logprobs": 2}
    fields.setdefault("temperature", 0)
    if "regex" in fields:
        fields["guided_regex"] = fields.pop("regex")
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    choices = server.complete(prompt, **fields)["choices"]
    whole = [one.complete for one in client.generate(prompt, **sampling, logprobs=2)]
    streamed = client.generate(prompt, stream=True, **sampling, logprobs=2)
    ends = [one.complete for one in streamed if one.WhichOneof("response") == "complete"]
    assert len(whole) == len(ends) == len(choices) == sampling.get("n", 1)
    for choice in choices:
        one = next(complete for complete in whole if complete.index == choice["index"])
        end = next(complete for complete in ends if complete.index == choice["index"])
        values = choice["logprobs"]["token_logprobs"]
        assert list(one.output_logprobs.token_logprobs) == pytest.approx(values, abs=1e-5)
        assert one.finish_reason == choice["finish_reason"] == end.finish_reason
        assert list(one.output_ids) == list(end.output_ids) == chunk_tokens(streamed, one.index)
        assert list(one.output_ids) == list(one.output_logprobs.token_ids)
        texts = [bytes([token]).decode() if token < 128 else None for token in one.output_ids]
        assert [t for t in texts if t] == [t for t, n in zip(choice["logprobs"]["tokens"], texts, strict=True) if n]
        assert one.completion_tokens == len(one.output_ids) and one.prompt_tokens == 3
        assert all(len(top.token_ids) == len(top.values) == 2 for top in one.output_logprobs.top_logprobs)
        assert one.HasField("matched_stop_str") == ("stop" in sampling)
        if "stop" in sampling:
            assert one.matched_stop_str == "jk"
        if "stop_token_ids" in sampling:
            assert one.matched_token_id == ord("m") == one.output_ids[-1]


def test_chunks_count_what_is_new_and_the_first_tells_of_the_prompt(client: Client, server: Served) -> None:
    responses = client.generate("abc", stream=True, max_tokens=6, prompt_logprobs=1, logprobs=0)
    *chunks, last = responses
    assert sum(one.chunk.completion_tokens for one in chunks) == 6 and last.complete.completion_tokens == 6
    first, *others = [one.chunk for one in chunks]
    assert list(first.input_logprobs.token_ids) == [97, 98, 99] and not first.input_logprobs.token_logprobs[0].HasField(
        "value"
    )
    assert [one.HasField("input_logprobs") for one in others] == [False] * len(others)
    assert first.prompt_tokens == 3 and len(first.output_logprobs.top_logprobs) == 0
    told = server.complete("abc", max_tokens=1, prompt_logprobs=1)["choices"][0]["prompt_logprobs"][1:]
    values = [value.value for value in first.input_logprobs.token_logprobs[1:]]
    assert values == pytest.approx([entry[str(token)]["logprob"] for entry, token in zip(told, (98, 99), strict=True)])
    assert [len(top.token_ids) for top in first.input_logprobs.top_logprobs] == [0, 1, 1]


def test_without_max_tokens_an_answer_goes_on_as_long_as_there_is_room(client: Client) -> None:
    complete = client.complete([97] * 4090)
    assert complete.finish_reason == "length" and complete.prompt_tokens + complete.completion_tokens == 4096


def test_a_prefix_that_was_cached_is_told(client: Client) -> None:
    prompt = list(b"a prefix that nobody else in this file asks for, long enough")
    first, second = client.complete(prompt, max_tokens=1), client.complete(prompt, max_tokens=1)
    assert first.cached_tokens == 0 < second.cached_tokens < len(prompt)


def test_abort_ends_a_request_and_gives_back_its_blocks(slow: tuple[Served, Client]) -> None:
    server, client = slow
    call = client.stub.Generate(generate_request(stream=True, request_id="one", max_tokens=200, n=2))
    next(call)
    whole = client.stub.Generate(generate_request(request_id="two", max_tokens=200))
    twice = client.fails(lambda: next(client.stub.Generate(generate_request(request_id="one", max_tokens=1))))
    assert twice.code() is grpc.StatusCode.ALREADY_EXISTS
    client.stub.Abort(pb.AbortRequest(request_ids=["one", "two", "three"]), timeout=60)
    ends = [one.complete for one in call if one.WhichOneof("response") == "complete"]
    assert sorted((end.index, end.finish_reason) for end in ends) == [(0, "abort"), (1, "abort")]
    assert all(end.completion_tokens == len(end.output_ids) < 200 for end in ends)
    assert [one.complete.finish_reason for one in whole] == ["abort"]
    server.wait_until(server.idle)
    ended = re.findall(r"icc:request_success_total\{.*abort.*\} (\S+)", server.ask("GET", "/metrics").raw.decode())
    assert ended == ["3.0"]


def test_an_abort_is_of_the_client_whose_request_it_is_and_may_come_before_the_engine_has_it() -> None:
    async def ends(running: RunningCall, stream: EngineStream) -> None:
        running.sent(stream)
        with pytest.raises(ClientGone):
            await asyncio.wait_for(stream.take(), 10)

    calls, streams = RunningCalls(), [EngineStream([Submit(0, (1,), SamplingParams())]) for _ in range(2)]
    with calls.named("mine", "one") as mine, calls.named("yours", "one") as yours, calls.named("mine", "") as other:
        calls.abort("mine", ["one", "", "two"])
        asyncio.run(ends(mine, streams[0]))
        for left in (yours, other):
            left.sent(streams[1])
        streams[1].push(Delta(0, 0))
        assert asyncio.run(streams[1].take()) == [Delta(0, 0)]
        streams[1].push(Delta(0, 0, (5,)))
        calls.abort("yours", ["one"])
        assert asyncio.run(streams[1].take()) == [Delta(0, 0, (5,))]  # deltas that arrived before are read first
        asyncio.run(ends(yours, streams[1]))
    with calls.named("mine", "one") as again:
        assert again is not mine


def test_a_client_that_cancels_gives_back_its_blocks(slow: tuple[Served, Client]) -> None:
    server, client = slow
    streamed = client.stub.Generate(generate_request("a" * 40, stream=True, max_tokens=200))
    whole = client.stub.Generate(generate_request("b" * 40, max_tokens=200))
    next(streamed)
    server.wait_until(lambda: server.metric("icc:num_requests_running") == 2)
    for call in (streamed, whole):
        call.cancel()
    server.wait_until(server.idle, 5)
    assert server.log.read_text().count("status=CANCELLED") == 2


def test_a_deadline_ends_a_request_and_gives_back_its_blocks(slow: tuple[Served, Client]) -> None:
    server, client = slow
    begin = time.monotonic()
    call = client.stub.Generate(generate_request("a" * 40, stream=True, max_tokens=400), timeout=1.5)
    error = client.fails(lambda: list(call))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and time.monotonic() - begin < 10
    server.wait_until(server.idle, 5)


def test_embeddings_are_those_of_http(write_engine: Callable[..., Path], tmp_path: Path, start: StartServer) -> None:
    facts = EmbeddingFacts("mean", False, 258)
    engine = write_engine(tmp_path / "toy.engine", embedding=facts, max_seq_len=64, max_step_tokens=16)
    client = Client(server := start("--grpc-port", "0", engine=engine))
    told = server.ask("POST", "/v1/embeddings", {"model": "toy", "input": [97, 98, 99]}).json["data"][0]["embedding"]
    request = pb.EmbedRequest(
        request_id="one", tokenized=pb.TokenizedInput(original_text="abc", input_ids=[97, 98, 99])
    )
    answer = client.stub.Embed(request, timeout=60)
    assert list(answer.embedding) == told and (answer.prompt_tokens, answer.embedding_dim) == (3, 258)
    for request, words in [
        (pb.EmbedRequest(), "tokenized.input_ids: there are none"),
        (pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[999])), "tokenized.input_ids: token id 999"),
        (pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[97] * 65)), "tokenized.input_ids: "),
    ]:
        error = client.fails(lambda request=request: client.stub.Embed(request, timeout=60))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and error.details().startswith(words)
    assert not client.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60).is_generation
    error = client.fails(lambda: client.generate())
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED and "compiled for embeddings" in error.details()
    error = client.fails(lambda: next(client.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
