"""Generator: runs jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import msgspec
from starlette.requests import ClientDisconnect

from ..engine.admission import Admission
from ..engine.engine_client import EngineClient, Stream
from ..engine.messages import Delta
from .answers import Answer
from .jobs import Job
from .metrics import Metrics
from .run import Run


class Generator:
    """Runs jobs: admission before anything else, then the engine; whatever happens, what was taken is given back."""

    def __init__(self, engine: EngineClient, admission: Admission, metrics: Metrics) -> None:
        self.engine, self.admission, self.metrics = engine, admission, metrics

    @contextlib.contextmanager
    def started(self, job: Job) -> Iterator[Run]:
        """The job, admitted and sent; what is left of it is cancelled at the end."""
        with self.admission.admitted(job.price, job.submits[0].priority):
            stream = self.engine.submit(job.submits)
            run = Run(job, stream)
            try:
                yield run
            except (asyncio.CancelledError, ClientDisconnect):
                run.reason = "abort"
                raise
            except BaseException:
                run.reason = "error"
                raise
            finally:
                self.engine.close(stream)
                self.metrics.request_ended(run)
                if run.reason is None and run.first is not None and "deadline" not in run.reasons:
                    self.admission.served(run.last - run.started - run.queued_s)


async def whole_answer(generator: Generator, job: Job, make: Callable[[Stream], Answer]) -> msgspec.Struct:
    """The answer in one piece."""
    with generator.started(job) as run:
        answer = make(run.stream)
        deltas: list[Delta] = []
        async for some in run.deltas():
            deltas += some
        return answer.whole(deltas)
