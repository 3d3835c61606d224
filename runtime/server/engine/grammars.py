"""Grammars: JSON schemas, regular expressions and EBNF as token masks, compiled beside the steps.

llguidance rather than xgrammar: it has no dependencies at all, where xgrammar 0.2.8 requires torch, transformers and
triton, which the runtime must not need; and it computes masks lazily within limits of fuel, so that no grammar can hold
up a step for long. `benchmarks/NOTES.md` has the comparison.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict

import llguidance
import numpy as np

from ...errors import IccError, RequestError
from ...llm import LLM
from .messages import Submit
from .worker import Constrain, Grammars

MAX_GRAMMAR_BYTES = 64 << 10
_CACHED = 64  # compiled grammars kept, the least recently used goes first; each holds at most a few hundred KiB


def parser_limits() -> llguidance.LLParserLimits:
    """Bounds on what one grammar may take: a mask takes at most a few ms, a compilation at most about 20 ms."""
    return llguidance.LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=10_000,
        max_grammar_size=50_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


class GrammarConstraint:
    """One completion's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        self._vocab_size = vocab_size

    def allowed(self) -> np.ndarray:
        """bool `[vocab]`; nothing is allowed after the matcher failed (its limits, or a token it did not allow)."""
        if self._matcher.is_error():
            return np.zeros(self._vocab_size, dtype=bool)
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].view(bool)

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class LlguidanceGrammars(Grammars):
    """Compiles in one thread of its own; llguidance works without the GIL."""

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: list[int]) -> None:
        self._source, self._vocab_size, self._end_ids = tokenizer_json, vocab_size, end_ids
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._asked: queue.SimpleQueue[Submit] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Submit, Constrain | IccError]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, llm: LLM) -> Grammars:
        """The grammars of an engine; of one without tokenizer or end token, none."""
        raw = None if llm.engine is None else llm.engine.tokenizer_json()
        model = llm.manifest.model
        if raw is None or not model.eos_token_ids:
            return Grammars()
        return cls(raw.decode(), model.vocab_size, list(model.eos_token_ids))

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
                self._done.put((submit, self._compile(submit.grammar)))
            except IccError as error:
                self._done.put((submit, error))
            except Exception as error:
                self._done.put((submit, RequestError(f"the grammar was refused: {error}", field="response_format")))

    def _compile(self, grammar: str) -> Constrain:
        if self._tokenizer is None:
            self._tokenizer = llguidance.LLTokenizer(self._source, n_vocab=self._vocab_size, eos_token=self._end_ids)
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
            if matcher.is_error():
                raise RequestError(f"the grammar was refused: {matcher.get_error()[:300]}", field="response_format")
            self._compiled[grammar] = matcher
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return lambda: GrammarConstraint(matcher.deep_copy(), self._vocab_size)
