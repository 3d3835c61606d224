"""VllmEngine over gRPC, asked by the generated stubs as routers do, and by a client that knows reflection only."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from icc.runtime.format.manifest import EmbeddingFacts
from icc.runtime.requests.params import SamplingParams
from icc.runtime.server.api.errors import ClientGone, HttpError
from icc.runtime.server.engine import kv_wire
from icc.runtime.server.engine.engine_stream import EngineStream
from icc.runtime.server.engine.kv_wire import StoredMap
from icc.runtime.server.engine.messages import Delta, Submit
from icc.runtime.server.grpc import asking, kv_feed
from icc.runtime.server.grpc.asking import completion_of, named_as_asked
from icc.runtime.server.grpc.calls import RunningCall, RunningCalls
from icc.runtime.server.grpc.errors import CODES, PUSHBACK, STATUS, as_call_error
from icc.runtime.server.grpc.kv_feed import KVFeed
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from .conftest import HERE, Served, StartServer, running, serve_command

pytestmark = pytest.mark.slow
SERVICE = "vllm.grpc.engine.VllmEngine"
KEY = "a-key-of-thirty-two-characters-00"


def grpc_address(server: Served) -> str:
    """Where a server that was started with --grpc-port says that it listens, in its second line."""
    assert server.process.stdout is not None
    line = server.process.stdout.readline()
    assert line.startswith("serving gRPC on 127.0.0.1:"), (line, server.log.read_text())
    return line.split()[-1]


class Client:
    """The stub of a server's service."""

    def __init__(self, server: Served, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.address = grpc_address(server)
        target = self.address.replace("127.0.0.1", "localhost")
        self.channel = (
            grpc.insecure_channel(self.address) if credentials is None else grpc.secure_channel(target, credentials)
        )
        self.stub = vllm_engine_pb2_grpc.VllmEngineStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def generate(self, prompt: Any = "a", stream: bool = False, **sampling: Any) -> list[pb.GenerateResponse]:
        return list(self.stub.Generate(generate_request(prompt, stream, **sampling), timeout=60))

    def complete(self, prompt: Any = "a", **sampling: Any) -> pb.GenerateComplete:
        [response] = self.generate(prompt, **sampling)
        return response.complete

    def status(self, service: str = "") -> int:
        return self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status

    def fails(self, call: Callable[[], Any]) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as error:
            call()
        return error.value


def generate_request(
    prompt: Any = "a", stream: bool = False, request_id: str = "", **sampling: Any
) -> pb.GenerateRequest:
    given = {"text": prompt} if isinstance(prompt, str) else {"tokenized": pb.TokenizedInput(input_ids=prompt)}
    sampling.setdefault("temperature", 0)
    params = pb.SamplingParams(**sampling)
    return pb.GenerateRequest(request_id=request_id, sampling_params=params, stream=stream, **given)


@pytest.fixture(scope="module")
def server(chat_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    command = serve_command(chat_engine, "--grpc-port", "0")
    with running(command, tmp_path_factory.mktemp("grpc") / "log", "toy") as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Client:
    return Client(server)


@pytest.fixture(scope="module")
def slow(chat_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Client]]:
    """A server of which a step takes 0.2 s; tests leave it idle."""
    command = [sys.executable, str(HERE / "fault_server.py"), str(chat_engine), "slow", '{"grpc_port": 0}']
    with running(command, tmp_path_factory.mktemp("slow") / "log", "toy") as served:
        yield served, Client(served)


def chunk_tokens(responses: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    chunks = [one.chunk for one in responses if one.WhichOneof("response") == "chunk" and one.chunk.index == index]
    return [token for chunk in chunks for token in chunk.token_ids]


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
    """Streamed and not, of texts and tokens; completions over HTTP say their tokens by their log-probabilities."""
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
        assert asyncio.run(streams[1].take()) == [Delta(0, 0, (5,))]  # what has come is read first
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


def test_health_follows_the_engine(start_faulty: StartServer) -> None:
    client = Client(server := start_faulty("slow", grpc_port=0))
    kinds = health_pb2.HealthCheckResponse
    assert client.status() == client.status(SERVICE) == kinds.SERVING
    unknown = client.fails(lambda: client.status("nothing"))
    assert unknown.code() is grpc.StatusCode.NOT_FOUND
    watched = client.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
    assert next(watched).status == kinds.SERVING
    call = client.stub.Generate(generate_request(stream=True, max_tokens=100))
    next(call)
    os.kill(server.engine_pid, signal.SIGKILL)
    assert next(watched).status == kinds.NOT_SERVING  # told, not polled
    died = client.fails(lambda: list(call))
    assert died.code() is grpc.StatusCode.UNAVAILABLE and died.details() == "the engine died"
    assert dict(died.trailing_metadata())[PUSHBACK] == "1000"
    assert next(watched).status == kinds.SERVING
    answer = client.stub.HealthCheck(pb.HealthCheckRequest(), timeout=60)
    assert answer.healthy and answer.message == "ready"
    call = client.stub.Generate(generate_request(stream=True, max_tokens=30))
    next(call)
    server.process.send_signal(signal.SIGTERM)  # what runs may end; nothing new begins
    assert next(watched).status == kinds.NOT_SERVING
    refused = client.fails(lambda: client.generate(max_tokens=1))
    assert refused.code() is grpc.StatusCode.UNAVAILABLE and "shutting down" in refused.details()
    assert [one.complete.finish_reason for one in call if one.HasField("complete")] == ["length"]
    assert server.process.wait(60) == 0


def test_a_client_that_knows_reflection_only_is_answered(client: Client) -> None:
    database = ProtoReflectionDescriptorDatabase(client.channel)
    assert set(database.get_services()) >= {SERVICE, "grpc.health.v1.Health"}
    service = DescriptorPool(database).FindServiceByName(SERVICE)

    def ask(name: str, **fields: Any) -> Any:
        method = service.methods_by_name[name]
        asked, answered = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        kind = client.channel.unary_stream if method.server_streaming else client.channel.unary_unary
        call = kind(
            f"/{SERVICE}/{name}", request_serializer=asked.SerializeToString, response_deserializer=answered.FromString
        )
        return call(asked(**fields), timeout=60)

    assert ask("HealthCheck").healthy
    info = ask("GetModelInfo")
    assert info.is_generation and info.served_model_name == "toy" and info.max_context_length == 4096
    [response] = ask("Generate", text="abc", sampling_params={"max_tokens": 3, "temperature": 0})
    assert bytes(response.complete.output_ids) == b"def"


def test_facts_of_model_and_server(client: Client, server: Served, chat_engine: Path) -> None:
    info = client.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60)
    assert info.model_path == str(chat_engine) and info.vocab_size == 258 and list(info.eos_token_ids) == [257]
    assert Path(info.tokenizer_path, "tokenizer.json").is_file() and not info.supports_vision
    assert list(info.architectures) == ["Toy"]
    assert json.loads(info.default_sampling_params_json) == {"temperature": 0.0}
    facts = client.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)
    assert facts.data_parallel_size == 1 and facts.max_num_seqs == 8 and not facts.is_paused
    assert facts.constrained_decoding_start == "first_token" and 0 < facts.uptime_seconds < 3600
    assert facts.block_size == 4 and abs(facts.last_receive_timestamp - time.time()) < 600


def test_the_tokenizer_comes_as_a_zip(client: Client, chat_engine: Path) -> None:
    chunks = list(client.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=60))
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    assert found == {path.name: path.read_bytes() for path in (chat_engine / "tokenizer").iterdir()}


def test_loads_are_those_of_the_replicas(start_faulty: StartServer) -> None:
    client = Client(server := start_faulty("slow", grpc_port=0, replicas=2))
    idle = client.stub.GetLoads(pb.GetLoadsRequest(), timeout=60)
    assert idle.dp_rank_count == 2 and [load.dp_rank for load in idle.loads] == [0, 1]
    assert all(load.max_running_requests == 8 and load.max_total_num_tokens == 1024 for load in idle.loads)
    assert sum(load.num_total_reqs for load in idle.loads) == 0
    calls = [client.stub.Generate(generate_request("abc", stream=True, max_tokens=100, n=5)) for _ in range(4)]
    for call in calls:
        next(call)

    sections = ["core", "disagg", "queues", "memory"]  # what smg asks for

    def loads(**asked: Any) -> list[pb.SchedulerLoad]:
        return list(client.stub.GetLoads(pb.GetLoadsRequest(include=sections, **asked), timeout=60).loads)

    server.wait_until(lambda: sum(load.num_total_reqs for load in loads()) == 20)
    found = loads()
    assert sum(load.num_running_reqs for load in found) <= 16 and all(load.utilization <= 1 for load in found)
    assert all(0 < load.token_usage <= 1 and 0 < load.num_used_tokens <= 1024 for load in found)
    server.wait_until(lambda: all(load.gen_throughput > 0 for load in loads()))
    assert [load.dp_rank for load in loads(dp_rank=1)] == [1]
    for asked in ({"dp_rank": 2}, {"include": ["nothing"]}):
        error = client.fails(lambda asked=asked: client.stub.GetLoads(pb.GetLoadsRequest(**asked), timeout=60))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and next(iter(asked)) in error.details()
    pinned = generate_request()
    pinned.data_parallel_rank = 0
    error = client.fails(lambda: list(client.stub.Generate(pinned, timeout=60)))
    assert "data_parallel_rank: this server chooses" in error.details()
    for call in calls:
        call.cancel()
    server.wait_until(server.idle)


def test_tls_keys_and_the_size_of_the_queue_are_those_of_http(
    start: StartServer, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    tls = "--ssl-certfile", str(cert), "--ssl-keyfile", str(key)
    server = start("--grpc-port", "0", "--max-queue", "0", "--max-queue-tokens", "50", *tls, key=KEY)
    client = Client(server, grpc.ssl_channel_credentials(cert.read_bytes()))
    plain = vllm_engine_pb2_grpc.VllmEngineStub(grpc.insecure_channel(client.address))
    error = client.fails(lambda: plain.HealthCheck(pb.HealthCheckRequest(), timeout=60))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    request = generate_request(max_tokens=3)
    for metadata in (
        (),
        (("authorization", "Bearer wrong"),),
        (("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)),
    ):
        error = client.fails(
            lambda metadata=metadata: list(client.stub.Generate(request, metadata=metadata, timeout=60))
        )
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED and "API key" in error.details()
    info = client.fails(lambda: client.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60))
    assert info.code() is grpc.StatusCode.UNAUTHENTICATED
    assert client.status() == health_pb2.HealthCheckResponse.SERVING  # for whoever watches over the server
    for metadata in ((("authorization", f"Bearer {KEY}"),), (("x-api-key", KEY),)):
        [response] = client.stub.Generate(request, metadata=metadata, timeout=60)
        assert bytes(response.complete.output_ids) == b"bcd"
    error = client.fails(
        lambda: list(client.stub.Generate(generate_request(max_tokens=60), metadata=(("x-api-key", KEY),), timeout=60))
    )
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "at most" in error.details()
    assert dict(error.trailing_metadata())[PUSHBACK] == "-1"


def test_a_full_queue_says_when_to_come_again_and_the_server_s_own_deadline_ends_answers(
    start_faulty: StartServer,
) -> None:
    client = Client(start_faulty("slow", grpc_port=0, max_queue=0, max_seconds=2.0))
    held = client.stub.Generate(generate_request(stream=True, max_tokens=400, n=8))
    next(held)
    error = client.fails(lambda: client.generate(max_tokens=1))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and error.details() == "the queue is full"
    assert int(dict(error.trailing_metadata())[PUSHBACK]) >= 1000
    ends = [one.complete for one in held if one.HasField("complete")]
    assert [(end.finish_reason, 0 < end.completion_tokens < 400) for end in ends] == [("abort", True)] * 8


def test_calls_are_logged_with_their_ids(client: Client, server: Served) -> None:
    list(client.stub.Generate(generate_request(request_id="my-request", max_tokens=2), timeout=60))
    server.wait_until(lambda: "request_id=my-request" in server.log.read_text())
    [line] = [line for line in server.log.read_text().splitlines() if "request_id=my-request" in line]
    assert "path=Generate" in line and "status=OK" in line and "output_tokens=2" in line


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


# -- KV events ---------------------------------------------------------------------------------------------------------


class KVFollower:
    """Knows what the batches of a subscription tell: the tokens of every block by its hash, and its parent."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.numbers: list[int] = []

    def take(self, batch: common_pb2.KvEventBatch) -> None:
        self.numbers.append(batch.sequence_number)
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "cleared":
                self.blocks.clear()
            elif kind == "removed":
                for name in event.removed.block_hashes:
                    del self.blocks[name]
            else:
                parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                for block in event.stored.blocks:
                    assert parent is None or parent in self.blocks
                    assert len(block.token_ids) == block.block_size
                    self.blocks[block.block_hash] = parent, list(block.token_ids)
                    parent = block.block_hash

    def cached(self, tokens: list[int]) -> int:
        parent, at = None, 0
        while found := [
            (name, held)
            for name, (before, held) in self.blocks.items()
            if before == parent and tokens[at : at + len(held)] == held
        ]:
            parent, at = found[0][0], at + len(found[0][1])
        return at


def test_who_subscribes_knows_what_the_server_has(start_faulty: StartServer) -> None:
    """256 blocks of 4 tokens: from the beginning through eviction and the death of the engine, and by a snapshot."""
    client = Client(server := start_faulty("none", grpc_port=0))
    early = client.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=120)
    follower = KVFollower()
    follower.take(first := next(early))
    assert first.snapshot.count == 1 and first.events[0].WhichOneof("data") == "cleared" and not follower.blocks
    prompts = [[97 + number, 32] * 60 for number in range(14)]  # more than the cache holds
    for prompt in prompts:
        client.complete(prompt, max_tokens=8)
        while follower.cached(prompt) < 120:
            follower.take(next(early))
    assert len(follower.blocks) <= 256 and follower.cached(prompts[0]) < 120
    late = KVFollower()
    subscription = client.stub.SubscribeKvEvents(
        common_pb2.SubscribeKvEventsRequest(start_sequence_number=1), timeout=120
    )
    late.take(batch := next(subscription))
    assert batch.snapshot.count == 1 and batch.snapshot.blocks == len(late.blocks)
    while follower.numbers[-1] < batch.sequence_number:
        follower.take(next(early))
    assert late.blocks == follower.blocks and late.numbers[-1] == follower.numbers[-1]
    for prompt in prompts[-3:]:
        assert client.complete(prompt, max_tokens=1).cached_tokens == min(late.cached(prompt), 116)
    os.kill(server.engine_pid, signal.SIGKILL)
    while late.blocks:
        late.take(next(subscription))
    assert late.numbers == list(range(late.numbers[0], late.numbers[0] + len(late.numbers)))
    follower.take(next(early))
    server.wait_until(lambda: client.stub.HealthCheck(pb.HealthCheckRequest()).healthy)
    last = next(client.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=120)).sequence_number
    known = common_pb2.SubscribeKvEventsRequest(start_sequence_number=last + 1)
    continued = client.stub.SubscribeKvEvents(known, timeout=120)
    list(continued.initial_metadata())
    client.complete(prompts[0], max_tokens=1)
    batch = next(continued)
    assert not batch.HasField("snapshot") and batch.sequence_number == last + 1


def test_a_snapshot_comes_in_numbered_pieces_and_keeps_what_events_said() -> None:
    feed = KVFeed(2)
    names = [(1 << 63) + number for number in range(1200)]
    stored = StoredMap(
        names,
        None,
        tuple(range(2400)),
        2,
        None,
        "GPU",
        "an-adapter",
        [["salt"], *[None] * 1199],
        1,
        "sliding_window",
        6,
    )
    feed.publish(1, kv_wire._encoder.encode([stored]))
    batches = list(feed._snapshot())
    assert [batch.dp_rank for batch in batches] == [0, 1, 1, 1]
    assert [(b.snapshot.index, b.snapshot.count, b.snapshot.blocks) for b in batches[1:]] == [
        (0, 3, 1200), (1, 3, 1200), (2, 3, 1200)
    ]  # fmt: skip
    numbers = [batch.sequence_number for batch in batches]
    assert numbers == list(range(feed._number - 3, feed._number + 1))
    events = [event for batch in batches[1:] for event in batch.events]
    assert events[0].WhichOneof("data") == "cleared" and len(events) == 1201
    first, second = events[1].stored, events[2].stored
    assert first.blocks[0].block_hash == -(1 << 63) == second.parent_block_hash and not first.HasField(
        "parent_block_hash"
    )
    assert first.blocks[0].extra_keys[0].text == "salt" and not second.blocks[0].extra_keys
    assert (second.lora_name, second.group_idx, second.kv_cache_spec_kind) == ("an-adapter", 1, "sliding_window")
    assert (
        second.kv_cache_spec_sliding_window == 6
        and second.medium == "GPU"
        and list(second.blocks[0].token_ids) == [2, 3]
    )


def test_a_subscriber_that_falls_behind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "_UNSENT", 2)

    async def follow() -> list[bool]:
        feed, seen = KVFeed(1), list[bool]()
        batches = feed.batches(0)
        seen.append((await anext(batches)).HasField("snapshot"))
        for _ in range(4):
            feed.publish(0, None)
        with pytest.raises(HttpError, match="subscribe again") as error:
            async for batch in batches:
                seen.append(batch.HasField("snapshot"))
        assert as_call_error(error.value).status is grpc.StatusCode.RESOURCE_EXHAUSTED and not feed._subscribers
        return seen

    assert asyncio.run(follow()) == [True, False, False]


# -- vectors -----------------------------------------------------------------------------------------------------------


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


def test_what_the_engine_or_the_server_does_not_do_is_unimplemented(client: Client) -> None:
    calls = [
        lambda: client.stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[1])), timeout=60),
        lambda: client.stub.FlushCache(common_pb2.FlushCacheRequest(), timeout=60),
        lambda: client.stub.StartProfile(common_pb2.StartProfileRequest(), timeout=60),
        lambda: client.stub.StopProfile(common_pb2.StopProfileRequest(), timeout=60),
    ]
    assert [client.fails(call).code() for call in calls] == [grpc.StatusCode.UNIMPLEMENTED] * 4


# -- what is refused ---------------------------------------------------------------------------------------------------


def unknown_field(message: Any) -> Any:
    """The message with a field that no definition here has: number 900, varint 1."""
    return type(message).FromString(message.SerializeToString() + b"\xa0\x38\x01")


REFUSED = {
    "no prompt": (pb.GenerateRequest(), "input: give tokenized or text"),
    "no tokens": (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "tokenized.input_ids: there are none"),
    "tags": (generate_request(structural_tag="{}"), "structural_tag: icc has no structural tags"),
    "pixels": (pb.GenerateRequest(text="a", mm_inputs=pb.MultimodalInputs()), "mm_inputs: this engine reads texts"),
    "more pixels": (pb.GenerateRequest(text="a", extra_mm_inputs=[pb.MultimodalInputs()]), "extra_mm_inputs: this"),
    "media": (pb.GenerateRequest(text="a", media_refs=pb.MediaRefs()), "media_refs: this engine reads texts only"),
    "mooncake": (
        pb.GenerateRequest(text="a", kv_transfer_params=pb.KvTransferParams()), "kv_transfer_params: is the older form"
    ),
    "no JSON": (
        pb.GenerateRequest(text="a", kv_transfer_params_json="["), "kv_transfer_params_json: is no JSON object"
    ),
    "a rank": (pb.GenerateRequest(text="a", data_parallel_rank=1), "data_parallel_rank: this server chooses"),
    "unknown": (unknown_field(pb.GenerateRequest(text="a")), "field number 900 is not known here"),
    "unknown inside": (
        pb.GenerateRequest(text="a", sampling_params=unknown_field(pb.SamplingParams())),
        "sampling_params: field number 900 is not known here",
    ),
    "all logprobs": (generate_request(logprobs=-1), "logprobs: "),
    "too hot": (generate_request(temperature=1e9), "temperature: "),
    "too many": (generate_request(n=1000), "n: "),
    "top_p": (generate_request(top_p=1.5), "top_p: "),
    "a bias for no token": (generate_request(logit_bias={-1: 1.0}), "logit_bias"),
    "no schema": (generate_request(json_schema="{"), "json_schema: "),
    "no choices": (generate_request(choice=pb.ChoiceConstraint()), "choice"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_icc_does_not_do_is_refused_by_the_name_of_the_field(case: str, client: Client) -> None:
    request, words = REFUSED[case]
    error = client.fails(lambda: list(client.stub.Generate(request, timeout=60)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and error.details().startswith(words), error.details()
    assert "\n" not in error.details()


def test_every_field_of_a_request_is_used_or_refused() -> None:
    """A field that a later smg-grpc-proto adds must not be ignored: it is neither known nor in a table here."""
    assert {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} == asking._GENERATE | {
        name for name in asking._REFUSED if name in pb.GenerateRequest.DESCRIPTOR.fields_by_name
    }
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == asking._SAMPLING | {"structural_tag"}


def test_what_is_not_said_is_as_vllm_s_servicer_has_it() -> None:
    request = completion_of(pb.GenerateRequest(text="a"), 100, 1)
    said = (
        request.temperature,
        request.top_p,
        request.top_k,
        request.repetition_penalty,
        request.n,
        request.max_tokens,
    )
    assert said == (1.0, 1, 0, 1, 1, 100) and request.seed is None and request.logprobs is None
    for constraint, field in {
        "json_schema": "guided_json",
        "grammar": "guided_grammar",
        "regex": "guided_regex",
    }.items():
        one = completion_of(generate_request(**{constraint: '{"type": "object"}'}), 100, 1)
        assert getattr(one, field) == '{"type": "object"}'
    one = completion_of(generate_request(json_object=True), 100, 1)
    assert one.structured_outputs is not None and one.structured_outputs.json_object
    error = named_as_asked(HttpError(400, "no", "response_format"), generate_request(grammar="x"))
    assert (error.message, error.param) == ("grammar: no", "grammar")


def test_every_error_has_a_status() -> None:
    expected = {
        400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
        408: "DEADLINE_EXCEEDED", 409: "ALREADY_EXISTS", 413: "RESOURCE_EXHAUSTED", 429: "RESOURCE_EXHAUSTED",
        499: "CANCELLED", 500: "INTERNAL", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
    }  # fmt: skip
    assert {status: code.name for status, code in STATUS.items()} == expected and list(CODES) == ["unsupported"]
    assert as_call_error(ClientGone()).status is grpc.StatusCode.CANCELLED
    found = as_call_error(RuntimeError("a secret"))
    assert found.status is grpc.StatusCode.INTERNAL and "secret" not in found.message


# -- the extra ---------------------------------------------------------------------------------------------------------


def test_without_the_extra_the_server_says_how_to_install_it(chat_engine: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['smg_grpc_proto'] = None\n"
        "from icc.compiler.cli import main\n"
        f"main(['serve', {str(chat_engine)!r}, '--port', '0', '--grpc-port', '0'], prog_name='icc')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3 and "pip install 'icc-llm[grpc]'" in done.stderr and "Traceback" not in done.stderr
    assert "--grpc-port needs smg_grpc_proto, which is not installed" in done.stderr


def test_a_server_without_it_imports_no_grpc() -> None:
    code = "import sys, icc.runtime.server.http.serve; assert not {'grpc', 'smg_grpc_proto'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_port_that_is_taken_is_told_in_one_line(start: StartServer, client: Client) -> None:
    taken = client.address.rpartition(":")[2]
    server = start("--grpc-port", taken, wait=False)
    assert server.process.wait(60) == 2
    assert f"cannot listen for gRPC on 127.0.0.1:{taken}" in server.log.read_text()
