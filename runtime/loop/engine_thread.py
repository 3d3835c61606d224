"""EngineThread: an engine loop in a thread of its own, asked from any other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from ..batch.scheduled import Extras
from ..errors import IccError
from ..requests.embedding import PooledRequest
from ..requests.generation import Completion, Generation
from ..requests.increment import Increment
from ..requests.params import SamplingParams
from ..requests.request import Standing
from ..requests.sampler import Constrain
from .engine_loop import DEFAULT_STANDING, EngineLoop


class Opened(Protocol):
    """A loaded model: its loop, and how to let go of it."""

    @property
    def loop(self) -> EngineLoop: ...

    def close(self) -> None: ...


Model = TypeVar("Model", bound=Opened)

# what is told about a question: a piece of a streamed completion, all its completions (the end), or why there are none
News = Increment | list[Completion] | BaseException


@dataclass(slots=True, eq=False)
class Question:
    """A prompt for the engine. `tell` is called in the engine's thread; its last call has no Increment.

    streamed: pieces are told as they come; of one completion only.
    """

    token_ids: Sequence[int]
    params: SamplingParams
    constrain: Constrain | None
    tell: Callable[[News], object]
    streamed: bool = False
    generations: list[Generation] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Reading:
    """A prompt that is to become one vector. `tell` is called in the engine's thread, once: with the vector, or why
    there is none. skipped: so many of its first tokens are not pooled. extras: what it gives per token besides ids."""

    token_ids: Sequence[int]
    tell: Callable[[np.ndarray | BaseException], object]
    skipped: int = 0
    extras: Extras = field(default_factory=dict)
    embedding: PooledRequest | None = None


@dataclass(frozen=True, slots=True)
class _Cancel:
    question: Question | Reading


class _Close:
    """Nothing is asked after this."""


class EngineThread(Generic[Model]):
    """Opens a model, runs the steps of its loop while anything is asked, and closes it, all in one thread: a GPU's
    context belongs to one. Questions that come while a step runs join the next: all are batched together."""

    def __init__(self, open_model: Callable[[], Model], opened: Callable[[Model | BaseException], object]) -> None:
        """opened: is called in the thread with the model, or with why it could not be opened."""
        self._messages: queue.SimpleQueue[Question | Reading | _Cancel | _Close] = queue.SimpleQueue()
        self._open_model, self._opened = open_model, opened
        self._asked: dict[int, Question] = {}  # by the loop's ids of their completions
        self._readings: list[Reading] = []
        self._end: BaseException | None = None  # why nothing can be asked any more
        self._thread = threading.Thread(target=self._run, name="icc-engine", daemon=True)
        self._thread.start()

    def ask(self, question: Question | Reading) -> None:
        self._messages.put(question)

    def cancel(self, question: Question | Reading) -> None:
        """Nobody waits for the answer any more: its requests end, and nothing more is told."""
        self._messages.put(_Cancel(question))

    def close(self, wait: bool = True) -> None:
        """End everything and let go of the model; returns when that is done, or at once."""
        self._messages.put(_Close())
        if wait:
            self._thread.join()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            model = self._open_model()
        except BaseException as error:
            self._end = error
            self._opened(error)
            return
        self._opened(model)
        try:
            while self._turn(model.loop):
                pass
        finally:
            self._close(model.loop)
            model.close()

    def _turn(self, loop: EngineLoop) -> bool:
        """All messages that are here, of an idle engine at least one; then a step. False at the end."""
        while not loop.has_work() or not self._messages.empty():
            message = self._messages.get()
            if isinstance(message, _Close):
                return False
            if isinstance(message, _Cancel):
                self._forget(message.question, loop)
            else:
                self._take_up(message, loop)
        self._step(loop)
        return True

    def _take_up(self, question: Question | Reading, loop: EngineLoop) -> None:
        if self._end is not None:
            question.tell(self._end)
            return
        try:
            if isinstance(question, Reading):
                standing = Standing(extras=question.extras)
                question.embedding = loop.add_embedding(question.token_ids, question.skipped, standing)
                self._readings.append(question)
                return
            found = loop.add(question.token_ids, question.params, DEFAULT_STANDING, question.constrain)
        except Exception as error:
            question.tell(error)
            return
        question.generations = found
        self._asked.update((generation.request_id, question) for generation in found)
        self._report(question)  # a prompt that fills the context has ended already

    def _step(self, loop: EngineLoop) -> None:
        try:
            outputs = loop.step()
        except Exception as error:  # the device has failed for good
            self._end = error
            for question in [*set(self._asked.values()), *self._readings]:
                self._forget(question, loop)
                question.tell(error)
            return
        self._read(loop)
        for question in {self._asked[o.request_id]: None for o in outputs if o.request_id in self._asked}:
            self._report(question)

    def _read(self, loop: EngineLoop) -> None:
        """Take in what a step has read; tell the vectors that are complete."""
        for reading in list(self._readings):
            assert reading.embedding is not None
            try:
                reading.embedding.advance()
                if not reading.embedding.complete:
                    continue
                told = reading.embedding.vector()
            except Exception as error:  # the fault that ended it
                told = error
            self._forget(reading, loop)
            reading.tell(told)

    def _report(self, question: Question) -> None:
        generations = question.generations
        for generation in generations:
            while generation.outputs:
                output = generation.outputs.popleft()
                if question.streamed:
                    question.tell(Increment.of(output))
        if any(generation.finish_reason is None for generation in generations):
            return
        for generation in generations:
            del self._asked[generation.request_id]
        try:
            question.tell([generation.completion() for generation in generations])
        except Exception as error:  # the fault that ended it
            question.tell(error)

    def _forget(self, question: Question | Reading, loop: EngineLoop) -> None:
        if isinstance(question, Reading):
            if question in self._readings and question.embedding is not None:
                self._readings.remove(question)
                loop.end(question.embedding.scores)
            return
        for generation in question.generations:
            loop.end(generation)
            self._asked.pop(generation.request_id, None)

    def _close(self, loop: EngineLoop) -> None:
        self._end = IccError("the engine was closed")
        for question in [*set(self._asked.values()), *self._readings]:
            self._forget(question, loop)
            question.tell(self._end)
        while not self._messages.empty():
            message = self._messages.get()
            if isinstance(message, Question | Reading):
                message.tell(self._end)
