"""LoopDriver: an engine loop as its users see it: tasks go in, steps run, and what comes of each task is told."""

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
_PATIENCE_S = 1.0  # that a task waits for a slot while later ones may find theirs
_ARRIVAL_S = 0.01


@dataclass(slots=True, eq=False)
class EngineTask:
    """A prompt for an engine, and what has come of it.

    standing: among others. constrain: the query's grammar, compiled. scored: how many of the likeliest tokens are
    wanted per position of the prompt, before its completions; None for none of that. generations: the completions, once
    they are under way. reading: the prompt while it is read for a vector or its own log-probabilities, and after that.
    vector: float32 `[dimension]`, once it is there. error: what ended the task, where that is no part of a completion.
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
        """What the engine loop has of it."""
        return [*self.generations, *([] if self.reading is None else [self.reading.scores])]

    @property
    def num_ended(self) -> int:
        """How many of its completions have ended."""
        return sum(one.finish_reason is not None for one in self.generations)

    @property
    def done(self) -> bool:
        """Whether nothing more comes of it, once it was submitted."""
        if self.error is not None or self.vector is not None:
            return True
        return bool(self.generations) and all(one.finish_reason is not None for one in self.generations)


AnyTask = TypeVar("AnyTask", bound=EngineTask)


class TaskListener(Generic[AnyTask]):
    """Is told what comes of tasks, in the thread that runs the steps. This one leaves everything with the tasks."""

    def outputs(self, task: AnyTask) -> None:
        """There may be new outputs in its generations; whoever takes them out is not told of them again."""

    def read(self, task: AnyTask) -> None:
        """Its prompt is read: the vector, or the log-probabilities in `reading`, are there."""

    def failed(self, task: AnyTask, error: Exception) -> None:
        """It has ended by a fault of its own, before any completion was under way."""

    def lost(self, task: AnyTask, error: Exception) -> None:
        """It has ended because the engine has, or is closed."""
        self.failed(task, error)


class LoopDriver(Generic[AnyTask]):
    """Submits tasks to a loop, runs its steps, and tells the listener. Not thread-safe: one thread does all of it.

    listener: None where whoever submits looks at the tasks after each step, whose generations keep their outputs.
    Requests that others have added to the loop run beside the tasks, and are not told of.
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
        self._generating: dict[int, AnyTask] = {}  # who is told of what, by the loop's ids of completions
        self._reading: dict[AnyTask, None] = {}
        self._placed: dict[EngineTask, Loaded] = {}  # whose adapter is kept in its slot
        self._waiting: dict[AnyTask, float] = {}  # for their adapters, since when

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.loop.has_work() or bool(self._waiting)

    @property
    def awaited(self) -> list[str]:
        """The adapters that tasks wait for, by name."""
        return [task.query.adapter for task in self._waiting]

    def submit(self, task: AnyTask) -> None:
        """Queue a task, or keep it until its adapter is there. RequestError if its prompt or a parameter is invalid,
        CapacityError if it can never fit; then nothing of it is queued."""
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
        """Whether a task's adapter is in a slot, where it is kept now."""
        if self.adapters is None:
            raise RequestError(NO_ROOM, "compile the model with --adapters 8x16", field="adapter")
        oldest = next(iter(self._waiting.values()), None)
        if task not in self._waiting and oldest is not None and time.monotonic() - oldest > _PATIENCE_S:
            return False  # or those who come and go with adapters that are there would keep the others out for ever
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
        """Queue a task that has all it needs."""
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
        if any(one.outputs for one in task.generations):  # a prompt that fills the context has ended already
            self._listener.outputs(task)

    def abort(self, task: AnyTask, reason: str = "abort") -> None:
        """End a task, wherever it is; the last outputs of its completions say `reason`. The listener is not told.
        Nothing happens if it has ended, or was never submitted."""
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
        """Begin the tasks whose adapters have arrived, and let go those of tasks that have ended."""
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
        """Run one step, and tell what has come of the tasks. Nothing if there is no work.

        Raises what the device has failed of for good: every task has been told then, and is gone.
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
            except Exception as error:  # the fault that ended it, or its hidden states are not numbers
                self._fail(task, error)
                continue
            del self._reading[task]
            self.loop.end(reading.scores, "stop")
            self._listener.read(task)
            if task.vector is None:
                self._go_on(task)

    def _go_on(self, task: AnyTask) -> None:
        """The prompt was read; now its completions."""
        try:
            self._generate(task)
        except Exception as error:
            self._fail(task, error)

    def _fail(self, task: AnyTask, error: Exception) -> None:
        self.abort(task, "error")
        task.error = error
        self._listener.failed(task, error)

    def close(self, error: Exception) -> None:
        """End all tasks by an error, and tell it."""
        for task in {**dict.fromkeys(self._generating.values()), **self._reading, **self._waiting}:
            self.abort(task)
            task.error = error
            self._listener.lost(task, error)

    def scores(self, query: Query, standing: Standing = DEFAULT_STANDING) -> Iterator[np.ndarray]:
        """The logits of every position of a sequence, as float32 `[rows, vocab]` chunks in order.

        Each chunk is valid until the next is asked for. Tasks go on beside it.
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
