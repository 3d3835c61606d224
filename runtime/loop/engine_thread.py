"""EngineThread: an engine loop in its own thread, which other threads use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from ..errors import IccError
from ..requests.generation import Completion
from ..requests.increment import Increment
from .driver import EngineTask, LoopDriver, TaskListener
from .engine_loop import EngineLoop


class Opened(Protocol):
    """A loaded model: its loop, its adapters, and `close`."""

    @property
    def loop(self) -> EngineLoop:
        """The loop that runs the model's requests."""
        ...

    @property
    def adapters(self) -> ResidentAdapters | None:
        """The model's adapters; None if it has no room for adapters."""
        ...

    def close(self) -> None:
        """Stop threads and free all memory."""
        ...


if TYPE_CHECKING:
    from ..adapters.resident import ResidentAdapters

Model = TypeVar("Model", bound=Opened)

# news about a question: parts of a streamed completion; last, all completions, the vector, or the error
News = Increment | list[Completion] | np.ndarray | BaseException


@dataclass(slots=True, eq=False, kw_only=True)
class Question(EngineTask):
    """A task for the engine. `tell` is called in the engine's thread; the last call does not pass an Increment.

    streamed: whether increments are reported as they are generated; for one completion only.
    """

    tell: Callable[[News], object]
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class _Cancel:
    question: Question


class _Close:
    """The last message to the thread."""


class EngineThread(Generic[Model]):
    """Opens a model, runs the steps of its loop while there is work, and closes it, all in one thread, because a GPU's
    context belongs to one thread. Questions that arrive during a step join the next one, so that all are batched."""

    def __init__(self, open_model: Callable[[], Model], opened: Callable[[Model | BaseException], object]) -> None:
        """opened: called in the thread with the model, or with the error if it could not be opened."""
        self._messages: queue.SimpleQueue[Question | _Cancel | _Close] = queue.SimpleQueue()
        self._open_model, self._opened = open_model, opened
        self._end: BaseException | None = None  # the error for later questions
        self._thread = threading.Thread(target=self._run, name="icc-engine", daemon=True)
        self._thread.start()

    def ask(self, question: Question) -> None:
        """Queue a question; its `tell` gets all news about it. Any thread may call this."""
        self._messages.put(question)

    def cancel(self, question: Question) -> None:
        """Cancel a question: its requests end, and `tell` is not called any more."""
        self._messages.put(_Cancel(question))

    def close(self, wait: bool = True) -> None:
        """End all requests and close the model. wait: return only when that is done."""
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
        driver = LoopDriver(model.loop, _Teller(), model.adapters)
        try:
            while self._turn(driver):
                pass
        finally:
            self._close(driver)
            model.close()

    def _turn(self, driver: LoopDriver[Question]) -> bool:
        """Handle all queued messages (an idle engine waits for one), then run a step. False if the thread must end."""
        while not driver.has_work() or not self._messages.empty():
            message = self._messages.get()
            if isinstance(message, _Close):
                return False
            if isinstance(message, _Cancel):
                driver.abort(message.question)
            else:
                self._take_up(message, driver)
        try:
            driver.step()
        except Exception as error:  # the device has failed permanently
            self._end = error
        return True

    def _take_up(self, question: Question, driver: LoopDriver[Question]) -> None:
        if self._end is not None:
            question.tell(self._end)
            return
        try:
            driver.submit(question)
        except Exception as error:
            question.tell(error)

    def _close(self, driver: LoopDriver[Question]) -> None:
        self._end = error = IccError("the engine was closed")
        driver.close(error)
        while not self._messages.empty():
            message = self._messages.get()
            if isinstance(message, Question):
                message.tell(error)


class _Teller(TaskListener[Question]):
    """Passes results on to the `tell` of each question."""

    def outputs(self, task: Question) -> None:
        ended = False
        for generation in task.generations:
            while generation.outputs:
                output = generation.outputs.popleft()
                ended = ended or output.finish_reason is not None
                if task.streamed:
                    task.tell(Increment.of(output))
        if not ended or not task.done:
            return
        try:
            task.tell([generation.completion() for generation in task.generations])
        except Exception as error:  # the error that ended it
            task.tell(error)

    def read(self, task: Question) -> None:
        if task.vector is not None:
            task.tell(task.vector)

    def failed(self, task: Question, error: Exception) -> None:
        task.tell(error)
