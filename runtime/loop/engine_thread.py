"""EngineThread: an engine loop in a thread of its own, asked from any other."""

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
    """A loaded model: its loop, its room for adapters if it has any, and how to let go of it."""

    @property
    def loop(self) -> EngineLoop:
        """The loop that runs the model's requests."""
        ...

    @property
    def adapters(self) -> ResidentAdapters | None:
        """The model's room for adapters; None for none."""
        ...

    def close(self) -> None:
        """Stop threads and free all memory."""
        ...


if TYPE_CHECKING:
    from ..adapters.resident import ResidentAdapters

Model = TypeVar("Model", bound=Opened)

# what is told about a question: a piece of a streamed completion; then all its completions or its vector, or why there
# are none
News = Increment | list[Completion] | np.ndarray | BaseException


@dataclass(slots=True, eq=False, kw_only=True)
class Question(EngineTask):
    """A task for the engine. `tell` is called in the engine's thread; its last call has no Increment.

    streamed: pieces are told as they come; of one completion only.
    """

    tell: Callable[[News], object]
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class _Cancel:
    question: Question


class _Close:
    """Nothing is asked after this."""


class EngineThread(Generic[Model]):
    """Opens a model, runs the steps of its loop while anything is asked, and closes it, all in one thread: a GPU's
    context belongs to one. Questions that come while a step runs join the next: all are batched together."""

    def __init__(self, open_model: Callable[[], Model], opened: Callable[[Model | BaseException], object]) -> None:
        """opened: is called in the thread with the model, or with why it could not be opened."""
        self._messages: queue.SimpleQueue[Question | _Cancel | _Close] = queue.SimpleQueue()
        self._open_model, self._opened = open_model, opened
        self._end: BaseException | None = None  # why nothing can be asked any more
        self._thread = threading.Thread(target=self._run, name="icc-engine", daemon=True)
        self._thread.start()

    def ask(self, question: Question) -> None:
        """Queue a question; `tell` of it hears of all that comes of it. From any thread."""
        self._messages.put(question)

    def cancel(self, question: Question) -> None:
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
        driver = LoopDriver(model.loop, _Teller(), model.adapters)
        try:
            while self._turn(driver):
                pass
        finally:
            self._close(driver)
            model.close()

    def _turn(self, driver: LoopDriver[Question]) -> bool:
        """All messages that are here, of an idle engine at least one; then a step. False at the end."""
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
        except Exception as error:  # the device has failed for good
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
    """Tells those who have asked."""

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
        except Exception as error:  # the fault that ended it
            task.tell(error)

    def read(self, task: Question) -> None:
        if task.vector is not None:
            task.tell(task.vector)

    def failed(self, task: Question, error: Exception) -> None:
        task.tell(error)
