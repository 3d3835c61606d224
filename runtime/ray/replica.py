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
    digest: of the engine that was deployed, which every machine has at the same path.

    EngineChangedError, and no replica, where there is another engine on this machine.
    """

    async def __init__(self, options: ServeOptions, digest: str) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        configure(LogOptions(options.log_format, options.log_level))
        check_engine(Path(options.load.path), digest)
        self._served = Served(options, RefuseChanges)
        await self._served.start()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """What answers requests. Ray Serve asks for it when the engine is loaded."""
        return _WithEnd(self._served)

    async def check_health(self) -> None:
        """IccError while the engine takes no requests. It is started again here where it has died; where that does not
        help in three checks, Ray puts another replica in the place of this one."""
        if not self._served.core.engine.ready:
            raise IccError("the engine is not ready")

    async def record_routing_stats(self) -> dict[str, Any]:
        """How the replica is, for PrefixRouter."""
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
    """The server as an ASGI application whose lifespan, which Ray Serve ends with the replica, ends the engine."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            return await self._served.app(scope, receive, send)
        await receive()
        await send({"type": "lifespan.startup.complete"})  # the engine is loaded before
        await receive()
        await self._served.stop()  # what ran has ended by now, or its time was up
        await send({"type": "lifespan.shutdown.complete"})


def routing_stats(engine: EngineClient, tokens: int) -> dict[str, Any]:
    """What an engine process has to do, as NO_STATS of choosing.py has it. tokens: that its cache holds at most."""
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
    """Sequences that run at once, and blocks of the KV cache."""
    return (1, 1) if engine.facts is None else (engine.facts.max_batch_size, engine.facts.num_blocks)
