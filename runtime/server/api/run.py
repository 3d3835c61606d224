"""Run: a running job, in the HTTP process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from ..engine.engine_stream import EngineStream
from ..engine.messages import Delta
from .jobs import Job

_GRACE_S = 1.0  # how long the engine has to end a request after its deadline


class Run:
    """A running job: its deltas, and the times at which they came."""

    def __init__(self, job: Job, stream: EngineStream) -> None:
        self.job, self.stream = job, stream
        self.started = time.monotonic()
        self.first: float | None = None
        self.last = self.started
        self.gaps: list[tuple[float, int]] = []  # seconds between arrivals, and how many deltas came then
        self.queued_s = 0.0
        self.output_tokens = 0
        self.reasons: list[str] = []
        self._places = range(job.submits[0].params.n)
        self._open = {(place, index) for place in stream.ids for index in self._places}
        self.reason: str | None = None

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """The deltas as they come, until every completion has ended. The engine ends completions at their deadline; if
        it hangs and does not, they end here."""
        now = asyncio.get_running_loop().time()
        end = None if self.job.deadline is None else now + self.job.deadline + _GRACE_S
        while self._open:
            try:
                async with asyncio.timeout_at(end):
                    deltas = await self.stream.take()
            except TimeoutError:
                deltas = [Delta(*place, reason="deadline") for place in sorted(self._open)]
            self._note(deltas)
            yield deltas

    async def all_deltas(self) -> list[Delta]:
        """All deltas of a stream that is read as a whole, without those that a restarted prompt had before."""
        found: list[Delta] = []
        async for deltas in self.deltas():
            if again := self.stream.take_restarted():
                found = [delta for delta in found if delta.id not in again]
                ended = {(delta.id, delta.index) for delta in deltas if delta.reason is not None}
                self._open |= {(place, index) for place in again for index in self._places} - ended
            found += deltas
        self.output_tokens = sum(len(delta.token_ids) for delta in found)
        self.reasons = [delta.reason for delta in found if delta.reason is not None]
        return found

    def _note(self, deltas: list[Delta]) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = now
            self.queued_s = deltas[0].queued_s
        else:
            self.gaps.append((now - self.last, len(deltas)))
        self.last = now
        self.output_tokens += sum(len(delta.token_ids) for delta in deltas)
        ended = [delta for delta in deltas if delta.reason is not None]
        self.reasons += [delta.reason or "" for delta in ended]
        self._open -= {(delta.id, delta.index) for delta in ended}
