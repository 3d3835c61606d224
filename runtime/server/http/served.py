"""Served: the ASGI application of a server with its engine processes and its sandbox. It listens nowhere itself."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ...errors import UsageError
from ...garbage import settle
from ..api.core import Core
from ..api.gate import RequestGate
from ..api.judging import EngineJudge
from ..api.keys import ApiKeys
from ..api.metrics import Metrics
from ..api.openresponses.conversations import Conversations
from ..api.prices import read_prices
from ..batches.batches import Batches
from ..batches.store import BatchStore
from ..engine.prompt_folder import PromptFolder
from ..kv_publisher import KVPublisher
from ..log import LogOptions
from ..nixl.nixl import Nixl
from ..options import ServeOptions, adapter_folder, adapter_paths, check_role
from .access import AccessLog
from .app import build_app
from .gate import ClientGate
from .parts import ServerParts
from .prefillers import Prefillers

log = logging.getLogger("icc.serve")
_POLL_S = 0.05
KVTaker = Callable[[int, "bytes | None"], None]  # (replica, events in the form of `kv_wire`)


class Served:
    """Makes the parts of a server; starts, drains and stops them. `app` answers requests after `start`.

    around: adds middleware between the key check and the routes. IccError if an option is wrong; if the engine cannot
    be loaded, `start` raises it.
    """

    def __init__(self, options: ServeOptions, around: Callable[[ASGIApp], ASGIApp] = lambda app: app) -> None:
        check_role(options)
        self._drain_s = options.drain_s
        store = None if options.batch_store is None else BatchStore(options.batch_store)
        folder = None
        if options.prompt_cache is not None:
            folder = PromptFolder.of(options.prompt_cache, options.prompt_cache_bytes)
        prices = None if options.prices is None else read_prices(options.prices)
        secret = store.secret() if store is not None else None if folder is None else folder.secret()
        keys = ApiKeys(secret=secret) if options.api_key_file is None else ApiKeys.read(options.api_key_file, secret)
        self.has_keys = keys.required
        self.core = core = Core(
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
            role=options.role,
            devices=options.devices,
            adapters=adapter_paths(options.lora),
            adapter_folder=adapter_folder(options.lora_dir),
            watermark=options.watermark,
            prompt_folder=folder,
            prices=prices,
        )
        if options.judge is not None:
            core.generator.judge = EngineJudge(
                options.judge, options.load, LogOptions(options.log_format, options.log_level)
            )
        metrics = Metrics(core.model.name, generates=not core.model.embeds, vllm=options.vllm_metrics, prices=prices)
        core.observe(metrics)
        self._kv_publisher = _kv_publisher(options)
        self._kv_takers: list[KVTaker] = [] if self._kv_publisher is None else [self._kv_publisher.publish]
        self._batches = None if store is None else Batches(store, core.jobs, core.generator, core.max_batch_size)
        self._nixl = Nixl() if options.nixl else None
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
            _prefillers(options, core, self._nixl),
            self._batches,
            self._nixl,
        )
        self.gate = RequestGate(keys, core.generator.admission)
        routes = ClientGate(around(build_app(parts)), self.gate, metrics, options.cors_origins)
        self.app: ASGIApp = AccessLog(_with_cors(routes, options.cors_origins), root_path(options.root_path))

    def publish_kv(self, publish: KVTaker) -> None:
        """Add a publisher of the prefix caches' changes, see `Core.publish_kv`. Call it before `start`."""
        self._kv_takers.append(publish)

    async def start(self) -> None:
        """Start the processes. IccError if the engine cannot be loaded."""
        if self._kv_takers:
            self.core.publish_kv(partial(_publish_all, self._kv_takers))
        if self._kv_publisher is not None:
            self._kv_publisher.start()
        if self._nixl is not None:
            await self._nixl.start()
        await self.core.start()
        if self._batches is not None:
            self._batches.start()
        settle()  # collections that examine what lives on take tens of milliseconds

    async def drain(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Refuse new requests, and wait until running ones have ended, `drain_s` have passed, or `hurried` returns
        True."""
        self.gate.draining = True
        if self._batches is not None:
            await self._batches.stop()
        admission = self.core.generator.admission
        end = asyncio.get_running_loop().time() + self._drain_s
        while admission.requests and not hurried() and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_POLL_S)
        if admission.requests:
            log.warning("%d requests did not end in time", admission.requests)
            await self.core.engine.stop()  # their streams end with an error
            for _ in range(20):
                if not admission.requests:
                    break
                await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """End the processes; open streams fail."""
        await self.core.stop()
        if self._nixl is not None:
            await self._nixl.stop()
        if self._kv_publisher is not None:
            self._kv_publisher.close()


def _publish_all(takers: Sequence[KVTaker], replica: int, events: bytes | None) -> None:
    for take in takers:
        take(replica, events)


def _prefillers(options: ServeOptions, core: Core, nixl: Nixl | None) -> Prefillers:
    """The servers that compute prompts for this one: prompts of requests that name one, and, with role decode, all long
    prompts."""
    limits = core.model.manifest.limits
    longest = limits.max_step_tokens if options.role == "decode" else None
    return Prefillers(options.prefiller, nixl=nixl, longest=longest, capacity=core.engine.tokens)


def _kv_publisher(options: ServeOptions) -> KVPublisher | None:
    if options.kv_events is not None:
        return KVPublisher(options.kv_events, options.kv_events_replay, options.kv_events_topic, options.replicas)
    if options.kv_events_replay is not None:
        raise UsageError(
            "--kv-events-replay repeats what --kv-events publishes", "give --kv-events tcp://127.0.0.1:5557"
        )
    return None


def root_path(given: str) -> str:
    """The prefix of all paths: "" or "/x". UsageError if it is not a path."""
    path = given.strip("/")
    if re.fullmatch(r"[A-Za-z0-9._~/-]*", path) is None:
        raise UsageError(f"--root-path {given!r} is no path", "such as /llm")
    return f"/{path}" if path else ""


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application with CORS for pages of these origins. Cookies are not needed: keys go in a header."""
    if not origins:
        return app
    exposed = ["x-request-id", "retry-after"]
    return CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)
