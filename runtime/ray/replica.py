"""EngineReplica: the server of `icc serve`, its engine process and all, in a replica of a Ray Serve deployment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

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
        return self._served.app

    async def __del__(self) -> None:
        """Ray Serve ends the replica: what ran has ended by now, or its time was up."""
        served: Served | None = getattr(self, "_served", None)
        if served is not None:
            await served.stop()

    async def check_health(self) -> None:
        """IccError while the engine takes no requests. It is started again here where it has died; where that does not
        help in three checks, Ray puts another replica in the place of this one."""
        if not self._served.core.engine.ready:
            raise IccError("the engine is not ready")

    async def record_routing_stats(self) -> dict[str, Any]:
        """How the replica is, for PrefixRouter."""
        return routing_stats(self._engine)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """How busy the replica is, for `scaling.policy`."""
        engine = self._engine
        slots, blocks = _room(engine)
        return {LOAD: replica_load(engine.stats, slots, blocks)}

    @property
    def _engine(self) -> EngineClient:
        [engine] = self._served.core.engine.replicas
        return engine


def routing_stats(engine: EngineClient) -> dict[str, Any]:
    """What an engine process has to do, as NO_STATS of request_router.py has it."""
    slots, blocks = _room(engine)
    told = engine.adapters
    named = [] if told is None else [*told.resident, *told.awaited]
    return {
        "waiting": sum(len(prompt.submit.prompt) for prompt in engine.open if not prompt.begun),
        "sequences": sum(prompt.stream.left[prompt.submit.id] for prompt in engine.open),
        "slots": slots,
        "usage": engine.stats.blocks_used / max(blocks, 1),
        "tokens": 0 if engine.facts is None else engine.facts.max_batch_size * engine.facts.max_seq_len,
        "adapters": sorted({*named, *(prompt.submit.adapter for prompt in engine.open)} - {""}),
    }


def _room(engine: EngineClient) -> tuple[int, int]:
    """Sequences that run at once, and blocks of the KV cache."""
    return (1, 1) if engine.facts is None else (engine.facts.max_batch_size, engine.facts.num_blocks)
