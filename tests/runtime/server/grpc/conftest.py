"""A server with gRPC, and its client by the generated stubs, as in routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from ..conftest import Served, running, serve_command

SERVICE = "vllm.grpc.engine.VllmEngine"


def grpc_address(server: Served) -> str:
    """The gRPC address that a server prints in its second line if it was started with --grpc-port."""
    assert server.process.stdout is not None
    line = server.process.stdout.readline()
    assert line.startswith("serving gRPC on 127.0.0.1:"), (line, server.log.read_text())
    return line.split()[-1]


class Client:
    """The stubs of a server's services."""

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


def chunk_tokens(responses: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    chunks = [one.chunk for one in responses if one.WhichOneof("response") == "chunk" and one.chunk.index == index]
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.fixture(scope="session")
def server(chat_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    command = serve_command(chat_engine, "--grpc-port", "0")
    with running(command, tmp_path_factory.mktemp("grpc") / "log", "toy") as served:
        yield served


@pytest.fixture(scope="session")
def client(server: Served) -> Client:
    return Client(server)
