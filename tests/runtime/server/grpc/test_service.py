"""The gRPC service as a whole: health, facts, loads, keys, its queue and log; and what is needed to serve it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from icc.runtime.server.grpc.errors import PUSHBACK
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from ..conftest import Served, StartServer
from .conftest import SERVICE, Client, generate_request

pytestmark = pytest.mark.slow
KEY = "a-key-of-thirty-two-characters-00"


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
    assert next(watched).status == kinds.NOT_SERVING  # pushed to the client, not polled
    died = client.fails(lambda: list(call))
    assert died.code() is grpc.StatusCode.UNAVAILABLE and died.details() == "the engine died"
    assert dict(died.trailing_metadata())[PUSHBACK] == "1000"
    assert next(watched).status == kinds.SERVING
    answer = client.stub.HealthCheck(pb.HealthCheckRequest(), timeout=60)
    assert answer.healthy and answer.message == "ready"
    call = client.stub.Generate(generate_request(stream=True, max_tokens=30))
    next(call)
    server.process.send_signal(signal.SIGTERM)  # running requests may end; new ones are refused
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

    sections = ["core", "disagg", "queues", "memory"]  # the sections that smg asks for

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


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


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
    assert client.status() == health_pb2.HealthCheckResponse.SERVING  # health needs no key, for monitoring
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
