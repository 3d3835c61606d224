"""GrammarCompiler: JSON schemas, regular expressions and EBNF as token masks.

llguidance rather than xgrammar: it has no dependencies at all, where xgrammar 0.2.8 requires torch, transformers and
triton, which the runtime must not need; and it computes masks lazily within limits of fuel, so that no grammar can hold
up a step for long. `benchmarks/NOTES.md` has the comparison.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import llguidance
import numpy as np

from ..errors import RequestError
from ..requests.sampler import Constrain

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


class GrammarCompiler:
    """Compiles grammars in llguidance's own format for one tokenizer, from any thread; the latest are kept.

    end_ids: the tokens that may end a text.
    """

    def __init__(self, tokenizer_json: bytes, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._source, self._vocab_size, self._end_ids = tokenizer_json, vocab_size, list(end_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> Constrain:
        """The grammar, for as many completions as wanted. RequestError if it is none, or beyond the limits."""
        with self._lock:
            matcher = self._matcher(grammar)
        return lambda: GrammarConstraint(matcher.deep_copy(), self._vocab_size)

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        if self._tokenizer is None:
            source = self._source.decode()
            self._tokenizer = llguidance.LLTokenizer(source, n_vocab=self._vocab_size, eos_token=self._end_ids)
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
            if matcher.is_error():
                reason = " ".join(matcher.get_error().split())[:300]
                raise RequestError(f"the grammar was refused: {reason}", field="response_format")
            self._compiled[grammar] = matcher
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return matcher
