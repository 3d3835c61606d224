"""LoopDriver: the interface to an engine loop: takes tasks, runs steps, and reports the results of each task."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec.structs import replace

from ..errors import RequestError
from ..format.adapters import ADAPTER
from ..query import Query
from ..requests.embedding import PooledRequest
from ..requests.generation import Generation
from ..requests.prompt_logprobs import PromptScores
from ..requests.request import Output, Request, Standing, State
from ..requests.sampler import Constrain
from .engine_loop import DEFAULT_STANDING, EngineLoop

if TYPE_CHECKING:
    import numpy as np

    from ..adapters.resident import Loaded, ResidentAdapters


NO_ROOM = "the engine has no room for adapters"
_PATIENCE_S = 1.0  # seconds that a task waits for an adapter slot before later tasks must wait, too
_ARRIVAL_S = 0.01


@dataclass(slots=True, eq=False)
class EngineTask:
    """A prompt for an engine, and its results.

    standing: its priority and the like, see Standing. constrain: the query's compiled grammar; None: it has none.
    scored: how many of the likeliest tokens to report per position of the prompt, before its completions; None: the
    prompt is not scored. generations: the completions, when they are queued. reading: the reading of the prompt for a
    vector or for its own log-probabilities; None if there is none. vector: float32 `[dimension]`; None until it is
    computed. error: the error that ended the task, unless it belongs to a completion; None if there is none.
    """

    query: Query
    standing: Standing = DEFAULT_STANDING
    constrain: Constrain | None = None
    scored: int | None = None
    generations: Sequence[Generation] = ()
    reading: PooledRequest | PromptScores | None = None
    vector: np.ndarray | None = None
    error: Exception | None = None

    @property
    def requests(self) -> list[Request]:
        """Its requests in the engine loop."""
        return [*self.generations, *([] if self.reading is None else [self.reading.scores])]

    @property
    def num_ended(self) -> int:
        """The number of its completions that have ended."""
        return sum(one.finish_reason is not None for one in self.generations)

    @property
    def done(self) -> bool:
        """Whether a submitted task is finished: it yields no further results."""
        if self.error is not None or self.vector is not None:
            return True
        return bool(self.generations) and all(one.finish_reason is not None for one in self.generations)


AnyTask = TypeVar("AnyTask", bound=EngineTask)


class TaskListener(Generic[AnyTask]):
    """Notified of the results of tasks, in the thread that runs the steps. This base class ignores all
    notifications."""

    def outputs(self, task: AnyTask) -> None:
        """Its generations may have new outputs. Outputs that are taken out are not reported again."""

    def read(self, task: AnyTask) -> None:
        """Its prompt is read: its vector, or the log-probabilities in `reading`, are available."""

    def failed(self, task: AnyTask, error: Exception) -> None:
        """It has ended by its own error, before any completion was queued."""

    def lost(self, task: AnyTask, error: Exception) -> None:
        """It has ended because the engine failed or was closed."""
        self.failed(task, error)


class LoopDriver(Generic[AnyTask]):
    """Submits tasks to a loop, runs its steps, and notifies the listener. Not thread-safe: one thread makes all calls.

    listener: None if the caller looks at the tasks after each step; their generations then keep the outputs. Requests
    that others add to the loop run, too, but are not reported.
    """

    def __init__(
        self,
        loop: EngineLoop,
        listener: TaskListener[AnyTask] | None = None,
        adapters: ResidentAdapters | None = None,
    ) -> None:
        self.loop, self.adapters = loop, adapters
        self._listener: TaskListener[AnyTask] = TaskListener() if listener is None else listener
        self._is_heard = listener is not None
        self._generating: dict[int, AnyTask] = {}  # the task of each completion, by the loop's request id
        self._reading: dict[AnyTask, None] = {}
        self._placed: dict[EngineTask, Loaded] = {}  # tasks whose adapter is kept in its slot
        self._waiting: dict[AnyTask, float] = {}  # tasks that wait for their adapter, and since when

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.loop.has_work() or bool(self._waiting)

    @property
    def awaited(self) -> list[str]:
        """The names of the adapters that tasks wait for."""
        return [task.query.adapter for task in self._waiting]

    def submit(self, task: AnyTask) -> None:
        """Queue a task, or hold it until its adapter is in a slot. RequestError if its prompt or a parameter is
        invalid, CapacityError if it can never fit; in these cases nothing is queued."""
        query = task.query
        if ADAPTER.name in query.extras:
            raise RequestError(f"input {ADAPTER.name!r} is for adapters", "name one", field="extras")
        if query.extras:
            task.standing = replace(task.standing, extras=query.extras)
        if query.adapter and not self._place(task):
            self._waiting[task] = time.monotonic()
        else:
            self._begin(task)

    def _place(self, task: EngineTask) -> bool:
        """Whether a task's adapter is in a slot; if so, it is now kept there for the task."""
        if self.adapters is None:
            raise RequestError(NO_ROOM, "compile the model with --adapters 8x16", field="adapter")
        oldest = next(iter(self._waiting.values()), None)
        if task not in self._waiting and oldest is not None and time.monotonic() - oldest > _PATIENCE_S:
            return False  # else a stream of tasks with loaded adapters could block the waiting ones for ever
        loaded = self.adapters.place(task.query.adapter, task.query.adapter_scale)
        if loaded is None:
            return False
        self._placed[task] = loaded
        begin = loaded.adapter.begin(task.query.token_ids)
        rows = loaded.rows(begin, self.loop.manifest.limits.max_seq_len)
        task.standing = replace(
            task.standing,
            extras={**task.standing.extras, ADAPTER.name: rows},
            adapter=b"" if begin is None else loaded.key,
            adapter_from=begin or 0,
        )
        return True

    def _begin(self, task: AnyTask) -> None:
        """Queue a task whose adapter, if any, is in a slot."""
        try:
            self._queue(task)
        except BaseException:
            self._release(task)
            raise

    def _queue(self, task: AnyTask) -> None:
        query = task.query
        if query.vector:
            task.reading = self.loop.add_embedding(query.token_ids, query.skipped, task.standing)
        elif task.scored is not None:
            scores = self.loop.add_score(query.token_ids, replace(task.standing, salt=b""))
            task.reading = PromptScores(scores, task.scored)
        else:
            self._generate(task)
            return
        self._reading[task] = None

    def _generate(self, task: AnyTask) -> None:
        query = task.query
        task.generations = self.loop.add(query.token_ids, query.params, task.standing, task.constrain)
        if not self._is_heard:
            return
        self._generating.update((one.request_id, task) for one in task.generations if one.finish_reason is None)
        if any(one.outputs for one in task.generations):  # e.g. a prompt that fills the context has ended already
            self._listener.outputs(task)

    def abort(self, task: AnyTask, reason: str = "abort") -> None:
        """End a task in any state; the last outputs of its completions state `reason`. The listener is not notified.
        Does nothing if it has ended or was never submitted."""
        for request in task.requests:
            self.loop.end(request, reason)
            self._generating.pop(request.request_id, None)
        self._reading.pop(task, None)
        self._waiting.pop(task, None)
        self._release(task)

    def _release(self, task: EngineTask) -> None:
        loaded = self._placed.pop(task, None)
        if loaded is not None and self.adapters is not None:
            self.adapters.release(loaded)

    def _admit(self) -> None:
        """Begin the tasks whose adapters are now in slots, and release the adapters of ended tasks."""
        for task in list(self._placed):
            if task.requests and all(request.state is State.ENDED for request in task.requests):
                self._release(task)
        for task in list(self._waiting):
            try:
                if self._place(task):
                    del self._waiting[task]
                    self._begin(task)
            except Exception as error:
                self._fail(task, error)
        if self._waiting and not self.loop.has_work() and self.adapters is not None:
            self.adapters.wait(_ARRIVAL_S)

    def step(self) -> None:
        """Run one step and notify the listener of the results. Does nothing if there is no work.

        Raises the error of a device that has failed permanently, after all tasks were ended and reported.
        """
        if self._placed or self._waiting:
            self._admit()
        try:
            outputs = self.loop.step()
        except Exception as error:
            self.close(error)
            raise
        if self._generating:
            self._tell(outputs)
        if self._reading:
            self._take_readings()

    def _tell(self, outputs: Sequence[Output]) -> None:
        generating, tell, last = self._generating, self._listener.outputs, None
        for output in outputs:
            task = generating.get(output.request_id)
            if task is None:
                continue
            if output.finish_reason is not None:
                del generating[output.request_id]
            if task is not last:
                tell(task)
                last = task

    def _take_readings(self) -> None:
        for task in list(self._reading):
            reading = task.reading
            assert reading is not None
            try:
                reading.advance()
                if not reading.complete:
                    continue
                if isinstance(reading, PooledRequest):
                    task.vector = reading.vector()
            except Exception as error:  # the error that ended it, or hidden states that are not finite
                self._fail(task, error)
                continue
            del self._reading[task]
            self.loop.end(reading.scores, "stop")
            self._listener.read(task)
            if task.vector is None:
                self._go_on(task)

    def _go_on(self, task: AnyTask) -> None:
        """Queue the completions of a task whose prompt was scored."""
        try:
            self._generate(task)
        except Exception as error:
            self._fail(task, error)

    def _fail(self, task: AnyTask, error: Exception) -> None:
        self.abort(task, "error")
        task.error = error
        self._listener.failed(task, error)

    def close(self, error: Exception) -> None:
        """End all tasks with an error and notify the listener."""
        for task in {**dict.fromkeys(self._generating.values()), **self._reading, **self._waiting}:
            self.abort(task)
            task.error = error
            self._listener.lost(task, error)

    def scores(self, query: Query, standing: Standing = DEFAULT_STANDING) -> Iterator[np.ndarray]:
        """The logits of every position of a sequence, as float32 `[rows, vocab]` chunks in order.

        Each chunk is valid until the next is requested. Other tasks continue meanwhile.
        """
        task = EngineTask(query, replace(standing, extras=query.extras))
        while query.adapter and not self._place(task):
            assert self.adapters is not None
            self.adapters.wait(_ARRIVAL_S)
            self.step()
        scores = self.loop.add_score(query.token_ids, task.standing)
        remaining = len(scores.prompt)
        try:
            while remaining:
                self.step()
                for chunk in scores.take():
                    remaining -= len(chunk)
                    yield chunk
        finally:
            self.loop.end(scores)
            self._release(task)
