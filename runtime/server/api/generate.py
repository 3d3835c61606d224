"""Generator: runs jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from ..engine.admission import Admission
from ..engine.engine_pool import EnginePool
from ..engine.engine_stream import EngineStream
from ..engine.messages import Delta
from ..log import note
from .best import Judge, best_of
from .errors import ClientGone, HttpError
from .jobs import Job
from .run import Run


class AnswerWriter(Protocol):
    """Makes the client's answer from the deltas of a job: whole, or as the events of a stream."""

    def whole(self, deltas: Sequence[Delta]) -> msgspec.Struct:
        """The whole answer, from all deltas of the job."""
        ...

    def begin(self) -> Sequence[msgspec.Struct]:
        """The events before any delta."""
        ...

    def chunks(self, deltas: Sequence[Delta]) -> Sequence[msgspec.Struct]:
        """The events for new deltas; there may be none."""
        ...

    def end(self) -> Sequence[msgspec.Struct]:
        """The events after the last delta."""
        ...

    def failed(self, error: HttpError) -> Sequence[msgspec.Struct]:
        """The last events of a stream that fails after it began."""
        ...


class Generator:
    """Runs jobs: first admission, then the engine; all resources are released in any case.

    `observers` are called with every request that has ended, in whatever way. judge: chooses the best of several
    answers; None for none.
    """

    def __init__(self, engine: EnginePool, admission: Admission) -> None:
        self.engine, self.admission = engine, admission
        self.observers: list[Callable[[Run], None]] = [_note]
        self.judge: Judge | None = None

    @contextlib.contextmanager
    def started(self, job: Job, whole: bool = False) -> Iterator[Run]:
        """Admit a job and send it to the engine; at the end of the context, cancel what has not ended. whole: see
        EngineStream."""
        with self.admission.admitted(job.price, job.submits[0].priority):
            stream = self.engine.submit(job.submits, whole)
            run = Run(job, stream)
            try:
                yield run
            except (asyncio.CancelledError, ClientGone):
                run.reason = "abort"
                raise
            except BaseException:
                run.reason = "error"
                raise
            finally:
                self.engine.close(stream)
                for observe in self.observers:
                    observe(run)
                if run.reason is None and run.first is not None and "deadline" not in run.reasons:
                    self.admission.served(run.last - run.started - run.queued_s)


def _note(run: Run) -> None:
    """Add a request's tokens and times to its line in the log."""
    note(prompt_tokens=run.job.prompt_tokens, output_tokens=run.output_tokens)
    if run.first is not None:
        note(queued_ms=round(run.queued_s * 1e3, 1), first_ms=round((run.first - run.started) * 1e3, 1))


async def whole_answer(generator: Generator, job: Job, make: Callable[[EngineStream], AnswerWriter]) -> msgspec.Struct:
    """Run a job and return the whole answer."""
    if job.best is not None and generator.judge is not None:
        generator.judge.check()
    with generator.started(job, whole=True) as run:
        answer = make(run.stream)
        deltas = await run.all_deltas()
        if job.best is not None:
            end = None if job.deadline is None else run.started + job.deadline
            run.stream.chosen = await best_of(job, deltas, generator.judge, end)
        return answer.whole(deltas)
