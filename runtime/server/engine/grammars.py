"""Grammars compiled beside the steps of the engine process."""

from __future__ import annotations

import queue
import threading

from ...errors import IccError, RequestError
from ...grammars.compiler import GrammarCompiler
from ...llm import LLM
from ...requests.sampler import Constrain
from .messages import Submit
from .worker import Grammars


class LlguidanceGrammars(Grammars):
    """Compiles in one thread of its own; llguidance works without the GIL."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._asked: queue.SimpleQueue[Submit] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Submit, Constrain | IccError]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, llm: LLM) -> Grammars:
        """The grammars of an engine; of one without tokenizer or end token, none."""
        compiler = llm.prompting.grammars
        return Grammars() if compiler is None else cls(compiler)

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
                self._done.put((submit, self._compiler.compile(submit.grammar)))
            except IccError as error:
                self._done.put((submit, error))
            except Exception as error:
                self._done.put((submit, RequestError(f"the grammar was refused: {error}", field="response_format")))
