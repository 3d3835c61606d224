"""EngineStream: the output of an engine process for a request so far, or its error."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import IccError
from .messages import Delta, Embedded, KVGiven, PromptLogprobs, Submit


class EngineFailed(IccError):
    """The request cannot be answered: the engine process refused it, died or hangs. `status` is the HTTP status;
    `began` says whether the engine had the request when it failed."""

    def __init__(self, status: int, message: str, field: str = "", began: bool = False) -> None:
        super().__init__(message)
        self.status, self.field, self.began = status, field, began


class EngineStream:
    """The output for the prompts of one request, until every completion has ended or `EngineFailed`.

    submits: the prompts, whose ids are consecutive. whole: whether the client gets nothing before everything is
    complete, so that a prompt can be restarted. `prompt_logprobs`, `embeddings` and `kv_given` are by id. begun: the
    ids of prompts with output. chosen: by id, the indices of the completions to return, the best first; without an
    entry, all are returned. sent_ns, first_ns: when the stream was made, and when its first output came
    (`time.monotonic_ns`).
    """

    def __init__(self, submits: Sequence[Submit], whole: bool = False) -> None:
        self.submits, self.whole = submits, whole
        self._restarted: set[int] = set()
        self.first_id = submits[0].id
        self.left = {submit.id: submit.params.n for submit in submits}  # completions that have not ended
        self.begun: set[int] = set()
        self.chosen: dict[int, list[int]] = {}
        self.sent_ns = time.monotonic_ns()
        self.first_ns: int | None = None
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.embeddings: dict[int, bytes] = {}
        self.kv_given: dict[int, KVGiven] = {}
        # called with each KVGiven when it comes
        self.on_given: Callable[[KVGiven], None] = lambda given: None
        self._deltas: deque[Delta] = deque()
        self._failed: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ids(self) -> range:
        """The ids of the prompts."""
        return range(self.first_id, self.first_id + len(self.submits))

    async def take(self) -> list[Delta]:
        """The deltas since the last call, at least one; waits for it. Raises the error that `fail` got."""
        while not self._deltas:
            if self._failed is not None:
                raise self._failed
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas = list(self._deltas)
        self._deltas.clear()
        return deltas

    def push(self, delta: Delta) -> None:
        """Add a delta from the engine, and wake `take`."""
        self._deltas.append(delta)
        if self.first_ns is None:
            self.first_ns = time.monotonic_ns()
        self.begun.add(delta.id)
        self.left[delta.id] -= delta.reason is not None
        self._wake()

    def begin_again(self, submit: Submit) -> None:
        """Drop the output of a prompt, which is restarted."""
        if submit.id not in self.begun:
            return
        self._deltas = deque(delta for delta in self._deltas if delta.id != submit.id)
        self._restarted.add(submit.id)
        self.begun.discard(submit.id)
        self.left[submit.id] = submit.params.n

    def take_restarted(self) -> set[int]:
        """The ids of prompts that were restarted since the last call: their earlier deltas are void."""
        restarted, self._restarted = self._restarted, set()
        return restarted

    def add(self, found: PromptLogprobs | Embedded | KVGiven) -> None:
        """Add other output of a prompt."""
        if isinstance(found, Embedded):
            self.embeddings[found.id] = found.vector
        elif isinstance(found, KVGiven):
            self.kv_given[found.id] = found
            self.on_given(found)
        else:
            self.prompt_logprobs[found.id] = found

    def fail(self, error: Exception) -> None:
        """End with an error, which `take` raises after the deltas so far, and wake `take`."""
        self._failed = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(eq=False)
class SentPrompt:
    """A prompt of a request that is sent to engine processes. cost: the estimated number of its tokens to compute;
    runs: how many processes it was sent to."""

    stream: EngineStream
    submit: Submit
    cost: int = 0
    runs: int = 0

    @property
    def begun(self) -> bool:
        """Whether the prompt has output."""
        return self.submit.id in self.stream.begun

    @property
    def ended(self) -> bool:
        """Whether all completions of the prompt have ended."""
        return not self.stream.left[self.submit.id]


def fail_all(prompts: Sequence[SentPrompt], error: EngineFailed) -> None:
    """End the streams of lost prompts with an error."""
    for prompt in prompts:
        prompt.stream.fail(error)
