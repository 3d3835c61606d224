"""EngineReplica: the server of `icc serve`, its engine process and all, in a replica of a Ray Serve deployment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import IccError
from ..server.engine.engine_client import EngineClient
from ..server.http.served import Served
from ..server.log import LogOptions, configure
from ..server.options import ServeOptions
from .refused import RefuseChanges
from .same_engine import check_engine
from .scaling import LOAD, replica_load


class EngineReplica:
    """One replica; Ray Serve calls its methods. options: as for a server that listens itself, with one engine process.
    digest: of the deployed engine, which every machine has at the same path.

    EngineChangedError, and no replica, if this machine has another engine at that path.
    """

    async def __init__(self, options: ServeOptions, digest: str) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        configure(LogOptions(options.log_format, options.log_level))
        check_engine(Path(options.load.path), digest)
        self._served = Served(options, RefuseChanges)
        await self._served.start()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application that answers requests. Ray Serve asks for it once the engine is loaded."""
        return _WithEnd(self._served)

    async def check_health(self) -> None:
        """IccError while the engine takes no requests. An engine that has died is restarted here; if three checks fail,
        Ray replaces the replica."""
        if not self._served.core.engine.ready:
            raise IccError("the engine is not ready")

    async def record_routing_stats(self) -> dict[str, Any]:
        """The replica's load, for PrefixRouter."""
        limits = self._served.core.model.manifest.limits
        return routing_stats(self._engine, limits.max_batch_size * limits.max_seq_len)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """How busy the replica is, for `scaling.policy`."""
        engine = self._engine
        slots, blocks = _room(engine)
        return {LOAD: replica_load(engine.stats, slots, blocks)}

    @property
    def _engine(self) -> EngineClient:
        [engine] = self._served.core.engine.replicas
        return engine


class _WithEnd:
    """The server as an ASGI application. Ray Serve ends its lifespan with the replica, and that ends the engine."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            return await self._served.app(scope, receive, send)
        await receive()
        await send({"type": "lifespan.startup.complete"})  # the engine was loaded before
        await receive()
        await self._served.stop()  # running requests have ended, or drain_s has passed
        await send({"type": "lifespan.shutdown.complete"})


def routing_stats(engine: EngineClient, tokens: int) -> dict[str, Any]:
    """The load of an engine process, with the keys of NO_STATS in choosing.py. tokens: the capacity of its cache."""
    slots, blocks = _room(engine)
    told = engine.adapters
    named = [] if told is None else [*told.resident, *told.awaited]
    return {
        "waiting": sum(len(prompt.submit.prompt) for prompt in engine.open if not prompt.begun),
        "sequences": sum(prompt.stream.left[prompt.submit.id] for prompt in engine.open),
        "slots": slots,
        "usage": engine.stats.blocks_used / max(blocks, 1),
        "tokens": tokens,
        "ready": engine.takes,
        "adapters": sorted({*named, *(prompt.submit.adapter for prompt in engine.open)} - {""}),
    }


def _room(engine: EngineClient) -> tuple[int, int]:
    """(sequences that run at once, blocks of the KV cache)."""
    return (1, 1) if engine.facts is None else (engine.facts.max_batch_size, engine.facts.num_blocks)
