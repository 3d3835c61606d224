"""A replica without its cluster: the class that Ray Serve instantiates, in this process, with a real engine process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from icc.runtime.errors import EngineChangedError, IccError
from icc.runtime.format.load import read_manifest
from icc.runtime.options import LoadOptions
from icc.runtime.ray.choosing import NO_STATS
from icc.runtime.ray.replica import EngineReplica
from icc.runtime.server.options import ServeOptions
from uvicorn import Config
from uvicorn.lifespan.on import LifespanOn


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """Restore logging: a replica configures the logs of its process."""
    root, icc = logging.getLogger(), logging.getLogger("icc")
    before = root.level, icc.level, root.handlers[:]
    yield
    root.setLevel(before[0])
    icc.setLevel(before[1])
    root.handlers[:] = before[2]


async def made(engine: Path, digest: str) -> EngineReplica:
    """As Ray Serve makes it: constructors may be coroutines."""
    replica = EngineReplica.__new__(EngineReplica)
    options = ServeOptions(LoadOptions(engine, threads=1), log_level="error")
    await replica.__init__(options, digest)  # type: ignore[misc]
    return replica


class Call:
    """A request to an ASGI application, whose client may disconnect."""

    def __init__(self, app: Any, body: dict[str, Any]) -> None:
        self.parts, self.status, self.gone = list[bytes](), 0, asyncio.Event()
        self._body = [json.dumps(body).encode()]
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers,
                 "query_string": b"", "http_version": "1.1", "raw_path": b"", "root_path": ""}  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.parts.append(message.get("body", b""))


async def until(check: Callable[[], bool]) -> None:
    for _ in range(1000):
        if check():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("did not happen")


def test_a_replica_answers_and_says_how_it_is(make_engine: Callable[..., Path]) -> None:
    engine = make_engine(max_seq_len=4096, max_batch_size=4)

    async def run() -> None:
        with pytest.raises(EngineChangedError):
            await made(engine, "0" * 64)
        replica = await made(engine, read_manifest(engine).digest)
        lifespan = LifespanOn(Config(replica.__serve_build_asgi_app__(), lifespan="on", log_config=None))  # as Ray
        await lifespan.startup()
        try:
            assert not lifespan.should_exit
            await used(replica)
        finally:
            await lifespan.shutdown()
        assert replica._engine.pid is None

    async def used(replica: EngineReplica) -> None:
        app = replica.__serve_build_asgi_app__()
        await replica.check_health()
        idle = await replica.record_routing_stats()
        assert set(idle) == set(NO_STATS) and idle["tokens"] == 4 * 4096 and idle["sequences"] == 0
        call = Call(app, {"prompt": "a", "max_tokens": 3})
        await call.task
        assert call.status == 200 and json.loads(b"".join(call.parts))["usage"]["completion_tokens"] == 3
        for cancels in (False, True):  # Ray's own servers do one or the other
            streamed = Call(app, {"prompt": "a", "max_tokens": 4000, "stream": True, "ignore_eos": True})
            await until(lambda parts=streamed.parts: len(parts) > 3)
            busy = await replica.record_routing_stats()
            assert busy["sequences"] == 1 and busy["slots"] == 4
            streamed.task.cancel() if cancels else streamed.gone.set()
            await asyncio.gather(streamed.task, return_exceptions=True)
            assert (await replica.record_routing_stats())["sequences"] == 0
            await until(lambda: replica._engine.stats.running == 0)  # in the engine's process, too
        assert set(await replica.record_autoscaling_stats()) == {"icc_load"}
        os.kill(replica._engine.pid or 0, signal.SIGKILL)
        await until(lambda: not replica._served.core.engine.ready)
        assert not (await replica.record_routing_stats())["ready"]
        with pytest.raises(IccError, match="not ready"):
            await replica.check_health()
        await until(lambda: bool(replica._served.core.engine.ready))
        await replica.check_health()

    asyncio.run(run())
