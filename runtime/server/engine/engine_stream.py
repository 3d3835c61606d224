"""EngineStream: what an engine process has said of a request so far, and how it failed."""

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
    """What comes back for the prompts of one request, until every completion has ended or `EngineFailed`.

    submits: the prompts, whose ids follow one another. whole: nothing is told before everything is here, so that a
    prompt can begin again. `prompt_logprobs`, `embeddings` and `kv_given` are by id. begun: the ids of which something
    has come. chosen: by id, which of its completions are given, the best first; nothing of an id of which all are.
    sent_ns, first_ns: when it was made, and when something came first (`time.monotonic_ns`).
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
        # called with what is given of a prompt, as it comes
        self.on_given: Callable[[KVGiven], None] = lambda given: None
        self._deltas: deque[Delta] = deque()
        self._failed: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ids(self) -> range:
        """The ids of its prompts."""
        return range(self.first_id, self.first_id + len(self.submits))

    async def take(self) -> list[Delta]:
        """The deltas that came since the last call, at least one. Raises what `fail` was given."""
        while not self._deltas:
            if self._failed is not None:
                raise self._failed
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas = list(self._deltas)
        self._deltas.clear()
        return deltas

    def push(self, delta: Delta) -> None:
        """Take a delta from the engine, and wake who waits for one."""
        self._deltas.append(delta)
        if self.first_ns is None:
            self.first_ns = time.monotonic_ns()
        self.begun.add(delta.id)
        self.left[delta.id] -= delta.reason is not None
        self._wake()

    def begin_again(self, submit: Submit) -> None:
        """Forget what has come of a prompt, which runs once more."""
        if submit.id not in self.begun:
            return
        self._deltas = deque(delta for delta in self._deltas if delta.id != submit.id)
        self._restarted.add(submit.id)
        self.begun.discard(submit.id)
        self.left[submit.id] = submit.params.n

    def take_restarted(self) -> set[int]:
        """The ids of prompts that began again since the last call: their deltas before that no longer count."""
        restarted, self._restarted = self._restarted, set()
        return restarted

    def add(self, found: PromptLogprobs | Embedded | KVGiven) -> None:
        """Keep what was found of a prompt."""
        if isinstance(found, Embedded):
            self.embeddings[found.id] = found.vector
        elif isinstance(found, KVGiven):
            self.kv_given[found.id] = found
            self.on_given(found)
        else:
            self.prompt_logprobs[found.id] = found

    def fail(self, error: Exception) -> None:
        """End with an error, which `take` raises after what has come, and wake who waits."""
        self._failed = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(eq=False)
class SentPrompt:
    """A prompt of a request, as it is sent to engine processes. cost: the tokens of it that are computed, as far as
    known; runs: how many processes have had it."""

    stream: EngineStream
    submit: Submit
    cost: int = 0
    runs: int = 0

    @property
    def begun(self) -> bool:
        """Whether something of it has come."""
        return self.submit.id in self.stream.begun

    @property
    def ended(self) -> bool:
        """Whether all its completions have ended."""
        return not self.stream.left[self.submit.id]


def fail_all(prompts: Sequence[SentPrompt], error: EngineFailed) -> None:
    """End the streams of prompts that were lost."""
    for prompt in prompts:
        prompt.stream.fail(error)
