"""`icc serve`: listens on an address and serves an engine until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from ...errors import IccError, UsageError
from ..api import limits
from ..log import LogOptions, configure
from ..options import ServeOptions
from .http_protocol import HttpProtocol
from .served import Served

if TYPE_CHECKING:
    from ..grpc.server import GrpcServer

log = logging.getLogger("icc.serve")


class Server:
    """An HTTP server, and a gRPC server if requested, with their engine processes and sandbox."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._served = Served(options)
        check_bind(options.host, self._served.has_keys)
        check_certificate(options.ssl_certfile, options.ssl_keyfile)
        self._grpc = _grpc(options, self._served)
        self._signals = 0
        self._wake = asyncio.Event()
        self._rereading: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. IccError if the engine cannot be loaded or the address is taken."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        listener = _listen(self._options.host, self._options.port)
        http = _Uvicorn(self._config())
        serving = asyncio.create_task(http.serve([listener]))
        try:
            grpc = "" if self._grpc is None else await self._grpc.start()
            await self._until(self._load(listener, grpc))
            if not self._signals:
                await self._until(serving)
            await self._served.drain(lambda: self._signals > 1)
        finally:
            http.should_exit = True
            await self._served.stop()
            if self._grpc is not None:
                await self._grpc.stop()
            await asyncio.gather(serving, return_exceptions=True)

    async def _load(self, listener: socket.socket, grpc: str) -> None:
        await self._served.start()
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if self._options.ssl_certfile is None else "https"
        print(f"serving {self._served.core.model.name} on {scheme}://{shown}:{port}", flush=True)
        if grpc:
            print(f"serving gRPC on {grpc}", flush=True)

    async def _until(self, work) -> None:
        """Wait until the work is done or a signal comes, which cancels it."""
        task, wake = asyncio.ensure_future(work), asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait([task, wake], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            else:
                task.cancel()
        finally:
            wake.cancel()

    def _signalled(self) -> None:
        self._signals += 1
        self._wake.set()

    def _hung_up(self) -> None:
        """SIGHUP: change to the engine that is in the directory now."""
        if self._rereading is None or self._rereading.done():
            self._rereading = asyncio.create_task(self._read_again())
        else:
            log.error("SIGHUP: the engine is being loaded anew already; send it again when it is")

    async def _read_again(self) -> None:
        try:
            await self._served.core.changes.read_again(limits.CHANGE_S)
        except IccError as error:
            log.error("SIGHUP: the engine stays as it is: %s", error.message)
        else:
            log.info("SIGHUP: the engine was loaded anew")

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._served.app,
            http=HttpProtocol,
            ws="websockets-sansio",
            ws_max_size=limits.BODY_BYTES,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(limits.IDLE_S),
            timeout_graceful_shutdown=1,
            backlog=2048,
            ssl_certfile=self._options.ssl_certfile,
            ssl_keyfile=self._options.ssl_keyfile,
        )


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that leaves signals to Server."""

    def capture_signals(self):  # type: ignore[override]
        return contextlib.nullcontext()


def _grpc(options: ServeOptions, served: Served) -> GrpcServer | None:
    """The gRPC server; None if it is not requested. MissingExtraError without the extra `grpc`."""
    if options.grpc_port is None:
        return None
    from ..grpc.server import GrpcServer

    server = GrpcServer(options, served.core, served.gate)
    if server.kv is not None:
        served.publish_kv(server.kv.publish)
    return server


def check_bind(host: str, has_keys: bool) -> None:
    """UsageError if other machines can reach the address and there are no keys."""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and not has_keys:
        raise UsageError(
            f"--host {host} can be reached from other machines, and no API key is set",
            "give --api-key-file, or serve on 127.0.0.1",
        )


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """UsageError if the files cannot be used for HTTPS, or there is a key without a certificate. certificate: None for
    plain HTTP. key: None if it is in the certificate's file."""
    if certificate is None:
        if key is not None:
            raise UsageError("--ssl-keyfile is given without --ssl-certfile", "give both, as PEM files")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except OSError as error:  # ssl.SSLError is a subclass
        why = f"{certificate} cannot be used for HTTPS: {error.strerror or error}"
        raise UsageError(why, "give a PEM certificate and its key") from error


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.UNSENT_BYTES // 2)  # the kernel doubles it
        return listener
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error}", "another --port, or --host") from error


def serve(options: ServeOptions) -> int:
    """Run a server; returns the exit code."""
    configure(LogOptions(options.log_format, options.log_level))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    server = Server(options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.run())
    return 0
