"""`icc serve`: puts the parts together, runs them, and drains them when it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import re
import signal
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

import uvicorn
import uvloop
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ...errors import IccError, UsageError
from ..api import limits
from ..api.core import Core
from ..api.judging import EngineJudge
from ..api.keys import ApiKeys
from ..api.metrics import Metrics
from ..api.openresponses.conversations import Conversations
from ..batches.batches import Batches
from ..batches.store import BatchStore
from ..kv_publisher import KVPublisher
from ..log import LogOptions, configure
from ..options import ServeOptions, adapter_paths
from .access import AccessLog
from .app import build_app
from .gate import ClientGate
from .http_protocol import HttpProtocol
from .parts import ServerParts
from .prefillers import Prefillers

log = logging.getLogger("icc.serve")
_POLL_S = 0.05


class Server:
    """One HTTP server with its engine processes and its sandbox."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        store = None if options.batch_store is None else BatchStore(options.batch_store)
        secret = None if store is None else store.secret()
        keys = ApiKeys() if options.api_key_file is None else ApiKeys.read(options.api_key_file, secret)
        check_bind(options.host, keys.required)
        check_certificate(options.ssl_certfile, options.ssl_keyfile)
        self._core = core = Core(
            options.load,
            keys,
            name=options.name,
            max_queue=options.max_queue,
            max_queue_tokens=options.max_queue_tokens,
            watchdog_s=options.watchdog_s,
            max_seconds=options.max_seconds,
            max_wait_s=options.max_wait_s,
            command=options.command,
            log_options=LogOptions(options.log_format, options.log_level),
            otlp_endpoint=options.otlp_endpoint,
            chat_template=options.chat_template,
            replicas=options.replicas,
            prefill_replicas=options.prefill_replicas,
            devices=options.devices,
            adapters=adapter_paths(options.lora),
            adapter_folder=options.lora_dir,
            watermark=options.watermark,
        )
        if options.judge is not None:
            core.generator.judge = EngineJudge(
                options.judge, options.load, LogOptions(options.log_format, options.log_level)
            )
        metrics = Metrics(core.model.name, generates=not core.model.embeds, vllm=options.vllm_metrics)
        core.observe(metrics)
        self._kv_publisher = _kv_publisher(options)
        if self._kv_publisher is not None:
            core.publish_kv(self._kv_publisher.publish)
        self._batches = None if store is None else Batches(store, core.jobs, core.generator, core.max_batch_size)
        conversations = Conversations(core.model, core.jobs)
        parts = ServerParts(
            core.model,
            core.engine,
            core.jobs,
            core.generator,
            metrics,
            conversations,
            core.adapters,
            core.changes,
            Prefillers(options.prefiller),
            self._batches,
        )
        self._gate = ClientGate(build_app(parts), keys, metrics, core.generator.admission, options.cors_origins)
        self._app = AccessLog(_with_cors(self._gate, options.cors_origins), root_path(options.root_path))
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
            await self._until(self._load(listener))
            if not self._signals:
                await self._until(serving)
            await self._drain()
        finally:
            http.should_exit = True
            await self._core.stop()
            if self._kv_publisher is not None:
                self._kv_publisher.close()
            await asyncio.gather(serving, return_exceptions=True)

    async def _load(self, listener: socket.socket) -> None:
        if self._kv_publisher is not None:
            self._kv_publisher.start()
        await self._core.start()
        if self._batches is not None:
            self._batches.start()
        gc.collect()
        gc.freeze()  # what is here now stays: collections that look at it all take tens of milliseconds
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if self._options.ssl_certfile is None else "https"
        print(f"serving {self._core.model.name} on {scheme}://{shown}:{port}", flush=True)

    async def _until(self, work) -> None:
        """Wait for the work, or for a signal."""
        task, wake = asyncio.ensure_future(work), asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait([task, wake], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            else:
                task.cancel()
        finally:
            wake.cancel()

    async def _drain(self) -> None:
        """Take no more requests; let those that run end, but not for ever, and not after a second signal."""
        self._gate.draining = True
        if self._batches is not None:
            await self._batches.stop()
        admission = self._core.generator.admission
        end = asyncio.get_running_loop().time() + self._options.drain_s
        while admission.requests and self._signals < 2 and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_POLL_S)
        if admission.requests:
            log.warning("%d requests did not end in time", admission.requests)
            await self._core.engine.stop()  # their streams fail, and say so
            for _ in range(20):
                if not admission.requests:
                    break
                await asyncio.sleep(_POLL_S)

    def _signalled(self) -> None:
        self._signals += 1
        self._wake.set()

    def _hung_up(self) -> None:
        """SIGHUP: go on with what is in the engine's directory now."""
        if self._rereading is None or self._rereading.done():
            self._rereading = asyncio.create_task(self._read_again())

    async def _read_again(self) -> None:
        try:
            await self._core.changes.read_again(limits.CHANGE_S)
        except IccError as error:
            log.error("SIGHUP: the engine stays as it is: %s", error.message)
        else:
            log.info("SIGHUP: the engine was loaded anew")

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app,
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
    """Leaves the signals to Server."""

    def capture_signals(self):  # type: ignore[override]
        return contextlib.nullcontext()


def _kv_publisher(options: ServeOptions) -> KVPublisher | None:
    if options.kv_events is not None:
        return KVPublisher(options.kv_events, options.kv_events_replay, options.kv_events_topic, options.replicas)
    if options.kv_events_replay is not None:
        raise UsageError(
            "--kv-events-replay repeats what --kv-events publishes", "give --kv-events tcp://127.0.0.1:5557"
        )
    return None


def check_bind(host: str, has_keys: bool) -> None:
    """UsageError for an address that others can reach, without keys."""
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
    """UsageError if the files cannot be used for HTTPS. The key may be in the certificate's file."""
    if certificate is None:
        if key is not None:
            raise UsageError("--ssl-keyfile is given without --ssl-certfile", "give both, as PEM files")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except OSError as error:  # ssl.SSLError is one
        why = f"{certificate} cannot be used for HTTPS: {error.strerror or error}"
        raise UsageError(why, "give a PEM certificate and its key") from error


def root_path(given: str) -> str:
    """A path to stand before all others: "" or "/x". UsageError if it is none."""
    path = given.strip("/")
    if re.fullmatch(r"[A-Za-z0-9._~/-]*", path) is None:
        raise UsageError(f"--root-path {given!r} is no path", "such as /llm")
    return f"/{path}" if path else ""


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Pages of these origins may ask, and read the answers. Keys go in a header: there are no cookies."""
    if not origins:
        return app
    exposed = ["x-request-id", "retry-after"]
    return CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.UNSENT_BYTES // 2)  # the kernel doubles it
        return listener
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error}", "another --port, or --host") from error


def serve(options: ServeOptions) -> int:
    """Run a server; the exit code."""
    configure(LogOptions(options.log_format, options.log_level))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    server = Server(options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.run())
    return 0
