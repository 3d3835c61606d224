"""ServerParts: the objects that routes work with, and operations that several routes share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from fastapi import Request
from fastapi.responses import Response

from ..api.adapters import ServedAdapters
from ..api.asking import R
from ..api.changes import EngineChanges
from ..api.generate import AnswerWriter, Generator, whole_answer
from ..api.jobs import Job, Jobs
from ..api.metrics import Metrics
from ..api.model import ServedModel
from ..api.openresponses.conversations import Conversations
from ..batches.batches import Batches
from ..engine.engine_pool import EnginePool
from ..engine.engine_stream import EngineStream
from ..nixl.nixl import Nixl
from .bodies import decode_body, json_response
from .prefillers import Prefillers
from .streams import CHUNKS, EventStream, Framing, while_connected

GENERATION_ERRORS = (400, 404, 408, 413, 429, 500, 503)


@dataclass(frozen=True)
class ServerParts:
    """The objects that routes work with."""

    model: ServedModel
    engine: EnginePool
    jobs: Jobs
    generator: Generator
    metrics: Metrics
    conversations: Conversations
    adapters: ServedAdapters
    changes: EngineChanges
    prefillers: Prefillers
    batches: Batches | None = None
    nixl: Nixl | None = None

    async def read(self, request: Request, kind: type[R]) -> R:
        """The decoded body of a request, with the name of its model. HttpError 404 for an unknown model, 400 as
        `decode_body`."""
        return self.jobs.named(await decode_body(request, kind))

    async def answer(
        self,
        request: Request,
        job: Job,
        make: Callable[[EngineStream], AnswerWriter],
        streamed: bool | None,
        framing: Framing = CHUNKS,
    ) -> Response:
        """Run a job; returns its answer as a stream of events if `streamed` is true, or whole if it is None or
        False."""
        if streamed:
            return EventStream(self.generator, job, make, framing)
        answers: list[msgspec.Struct] = []

        async def work() -> None:
            answers.append(await whole_answer(self.generator, job, make))

        await while_connected(request.receive, work())
        return json_response(answers[0])

    async def encoded(self, request: Request, answer: Awaitable[bytes]) -> Response:
        """A JSON answer; its computation is cancelled if the client disconnects."""
        found: list[bytes] = []

        async def work() -> None:
            found.append(await answer)

        await while_connected(request.receive, work())
        return Response(found[0], media_type="application/json")
