"""Grammars that are compiled in a thread beside the steps."""

from __future__ import annotations

import queue
import threading

from ...errors import IccError, RequestError
from ...grammars import constraints
from ...llm import LLM
from ...requests.sampler import Constrain
from .messages import Submit
from .worker import GrammarService


class CompiledGrammars(GrammarService):
    """Compiles grammars in its own thread."""

    def __init__(self, grammars: constraints.Grammars) -> None:
        self._grammars = grammars
        self._asked: queue.SimpleQueue[Submit] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Submit, Constrain | IccError]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, llm: LLM) -> GrammarService:
        """The grammar service of an engine; one without grammars if the engine has no tokenizer or end token."""
        return GrammarService() if llm.prompting.grammars is None else cls(llm.prompting.grammars)

    def request(self, submit: Submit) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()
        self._asked.put(submit)

    def finished(self) -> list[tuple[Submit, Constrain | IccError]]:
        results = []
        while not self._done.empty():
            results.append(self._done.get())
        return results

    def _work(self) -> None:
        while True:
            submit = self._asked.get()
            try:
                self._done.put((submit, self._grammars.compile(submit.grammar)))
            except IccError as error:
                self._done.put((submit, error))
            except Exception as error:
                self._done.put((submit, RequestError(f"the grammar was refused: {error}", field="response_format")))
