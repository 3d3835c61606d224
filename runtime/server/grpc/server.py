"""GrpcServer: listens for gRPC beside the HTTP server, over the same engine, keys and queue."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ...errors import MissingExtraError, UsageError
from ..api import limits
from ..api.core import Core
from ..api.gate import RequestGate
from ..options import ServeOptions

try:
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection
    from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"--grpc-port needs {error.name}, which is not installed", "pip install 'icc-llm[grpc]'"
    ) from error

from .kv_feed import KVFeed
from .readable import ReadableRequests
from .servicer import Servicer

SERVICE: str = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name
_POLL_S = 0.1  # between two checks whether the engine is ready
_MESSAGE_BYTES = 2 * limits.BODY_BYTES  # the largest request
_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MESSAGE_BYTES))


class GrpcServer:
    """VllmEngine, the standard health service and reflection, on their own port.

    They answer from `start` on, before the engine is ready; the health status is NOT_SERVING until it is, and once the
    server drains. MissingExtraError without the extra `grpc`.
    """

    def __init__(self, options: ServeOptions, core: Core, gate: RequestGate) -> None:
        assert options.grpc_port is not None
        self._host, self._port = options.host, options.grpc_port
        self._certificate, self._key = options.ssl_certfile, options.ssl_keyfile
        self.kv = None if core.model.embeds else KVFeed(len(core.engine.replicas))
        self._servicer = Servicer(core, gate, self.kv)
        self._server: grpc.aio.Server | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start listening; returns the address. UsageError if it is taken."""
        self._server = server = grpc.aio.server(interceptors=(ReadableRequests(),), options=_OPTIONS)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._servicer, server)
        states: Any = health.aio.HealthServicer()  # pyright: ignore  # there where grpc.aio is
        health_pb2_grpc.add_HealthServicer_to_server(states, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            port = self._listen(server, f"{host}:{self._port}")
        except (RuntimeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"cannot listen for gRPC on {host}:{self._port}", "another --grpc-port, or --host"
            ) from error
        await self._tell(states)
        await server.start()
        self._watch = asyncio.create_task(self._tell_changes(states))
        return f"{host}:{port}"

    def _listen(self, server: grpc.aio.Server, address: str) -> int:
        if self._certificate is None:
            return server.add_insecure_port(address)
        chain = self._certificate.read_bytes()
        key = chain if self._key is None else self._key.read_bytes()
        return server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)]))

    async def _tell_changes(self, states: Any) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            await self._tell(states)

    async def _tell(self, states: Any) -> None:
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if self._servicer.is_healthy else kinds.NOT_SERVING
        for name in ("", SERVICE):
            await states.set(name, status)

    async def stop(self) -> None:
        """Stop listening; the remaining calls end."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        if self._server is not None:
            await self._server.stop(_POLL_S)
