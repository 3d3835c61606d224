"""`icc batch --ray`: a file of requests answered by engines on the machines of a cluster; it can be resumed, as without
--ray."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ..format.load import read_manifest
from ..options import LoadOptions
from ..server.batches.batch_lines import BatchLine, LineResponse, LineResult, run_line
from ..server.batches.offline import Done, answer_file
from .cluster import joined
from .library import import_ray
from .options import RayOptions
from .resources import ReplicaPlace, replica_place
from .same_engine import check_engine

_AGAIN_S = 0.5
_DEATHS = 2  # engine crashes per line: a line that crashes engines must not end all of them


class Lost(Exception):
    """The engine that was answering a line has ended, or its machine has."""


class Answering(Protocol):
    """A remote engine that answers lines. `answer` takes a line as JSON and returns its status and its result as JSON,
    or raises Lost."""

    async def answer(self, line: bytes) -> tuple[int, bytes]:
        """The status and the result of a line."""
        ...

    async def back(self) -> None:
        """Wait until the engine takes lines again after a Lost."""
        ...


def run_on_ray(
    load: LoadOptions,
    source: Path,
    target: Path,
    adapters: Mapping[str, Path],
    options: RayOptions,
    engines: int | None,
) -> None:
    """As `run_offline`, with this number of engines; engines None: as many as fit into the cluster. A line whose engine
    ends is tried once more; after a second loss it is answered with 503."""
    manifest = read_manifest(Path(load.path))
    place = replica_place(load, manifest, options)

    def answer(lines: list[BatchLine], done: Done) -> None:
        with joined(options.address) as ray:
            count = engines or max(place.fits(ray.cluster_resources()), 1)
            each = 2 * manifest.limits.max_batch_size
            found = {name: str(path.absolute()) for name, path in adapters.items()}
            actors = [_Actor(ray, place, manifest.digest, found, each) for _ in range(min(count, len(lines)))]
            asyncio.run(spread(lines, actors, each, done))

    import_ray()
    answer_file(source, target, answer)


async def spread(lines: Sequence[BatchLine], engines: Sequence[Answering], each: int, done: Done) -> None:
    """Have the lines answered, with at most `each` at a time on an engine. If its engine is lost, a line goes to the
    next free engine; after the second loss it is answered with 503."""
    waiting = deque((line, 0) for line in lines)
    left = len(waiting)
    changed = asyncio.Event()

    async def work(engine: Answering, there: asyncio.Event) -> None:
        nonlocal left
        while left:
            await there.wait()
            if not left:
                return
            if not waiting:
                changed.clear()
                await changed.wait()  # a lost line may be queued again
                continue
            line, deaths = waiting.popleft()
            try:
                status, result = await engine.answer(msgspec.json.encode(line))
            except Lost as lost:
                if deaths + 1 < _DEATHS:
                    waiting.append((line, deaths + 1))
                    changed.set()
                    await _until_back(engine, there)
                    continue
                status, result = 503, _failed(line, str(lost))
            left -= 1
            changed.set()
            done(line, status, result)

    async with asyncio.TaskGroup() as group:
        for engine in engines:
            there = asyncio.Event()
            there.set()
            for _ in range(each):
                group.create_task(work(engine, there))


async def _until_back(engine: Answering, there: asyncio.Event) -> None:
    """Clear `there` until a lost engine is back, so that no line is sent to it meanwhile."""
    if there.is_set():
        there.clear()
        await engine.back()
        there.set()


def _failed(line: BatchLine, words: str) -> bytes:
    name = secrets.token_hex(12)
    body = {"error": {"message": words, "type": "server_error", "param": None, "code": "engine_lost"}}
    response = LineResponse(503, f"req_{name}", msgspec.Raw(msgspec.json.encode(body)))
    return msgspec.json.encode(LineResult(f"batch_req_{name}", line.custom_id, response))


class _Actor:
    """A LineActor, which Ray restarts when it ends, on another machine if need be."""

    def __init__(self, ray: Any, place: ReplicaPlace, digest: str, adapters: dict[str, str], each: int) -> None:
        load = replace(place.load, path=str(Path(place.load.path).absolute()))
        made = ray.remote(LineActor).options(max_restarts=-1, max_concurrency=each + 8, **place.actor)
        self._actor = made.remote(load.to_json(), digest, adapters)
        self._lost: Callable[..., Any] = ray.exceptions.RayActorError

    async def answer(self, line: bytes) -> tuple[int, bytes]:
        """The status and the result of a line, which may wait for the engine to be loaded."""
        try:
            return await self._actor.answer.remote(line)
        except self._lost as error:  # type: ignore[misc]
            raise Lost(f"the engine ended under this request: {type(error).__name__}") from error

    async def back(self) -> None:
        """Wait until Ray has started the actor again."""
        while True:
            try:
                return await self._actor.there.remote()
            except self._lost:  # type: ignore[misc]
                await asyncio.sleep(_AGAIN_S)


class LineActor:
    """Answers lines of batches with an engine process. adapters: their directories, by name."""

    def __init__(self, load: str, digest: str, adapters: Mapping[str, str]) -> None:
        self._load, self._digest = LoadOptions.from_json(load), digest
        self._adapters = {name: Path(path) for name, path in adapters.items()}
        self._starting: asyncio.Task[Any] | None = None

    async def answer(self, line: bytes) -> tuple[int, bytes]:
        """The status and the result of a line; the first ones wait until the engine is loaded."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        core = await asyncio.shield(self._starting)
        return await run_line(core.jobs, core.generator, "", msgspec.json.decode(line, type=BatchLine))

    async def there(self) -> None:
        """Return once the actor runs."""

    async def _start(self) -> Any:
        from ..server.api.core import Core
        from ..server.api.keys import ApiKeys

        check_engine(Path(self._load.path), self._digest)
        core = Core(self._load, ApiKeys(), adapters=self._adapters)
        await core.start()
        return core
