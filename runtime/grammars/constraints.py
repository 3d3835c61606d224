"""Grammars as token masks, for one tokenizer.

llguidance rather than xgrammar: it has no dependencies at all, where xgrammar 0.2.8 requires torch, transformers and
triton, which the runtime must not need; and it computes masks lazily within limits of fuel, so that no grammar can hold
up a step for long. `benchmarks/NOTES.md` has the comparison.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import RequestError
from .compiling import lowered, parser_limits

if TYPE_CHECKING:
    import llguidance

_CACHED = 64  # compiled grammars kept, the least recently used goes first; each holds at most a few hundred KiB


class GrammarConstraint:
    """One completion's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        self._vocab_size, self._end_ids = vocab_size, end_ids

    def allowed(self) -> np.ndarray:
        """bool `[vocab]`; nothing is allowed after the matcher failed (its limits, or a token it did not allow), and no
        end where the answer is not complete."""
        if self._matcher.is_error():
            return np.zeros(self._vocab_size, dtype=bool)
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")[: self._vocab_size].view(bool)
        if not self._matcher.is_accepting():  # a grammar that nothing follows from would allow the end at once
            bits[list(self._end_ids)] = False
        return bits

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class Grammars:
    """Compiles grammars for the tokenizer of one engine. llguidance works without the GIL.

    tokenizer_json: the text of the file; end_ids: the tokens that end an answer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._source, self._vocab_size, self._end_ids = tokenizer_json, vocab_size, list(end_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def compile(self, source: str) -> Callable[[], GrammarConstraint]:
        """What makes the constraint of each completion, from a text of `sources`, lowered or not. RequestError if the
        grammar is none, or one beyond the limits."""
        import llguidance

        if self._tokenizer is None:
            self._tokenizer = llguidance.LLTokenizer(self._source, n_vocab=self._vocab_size, eos_token=self._end_ids)
        matcher = self._compiled.get(source)
        if matcher is None:
            matcher = llguidance.LLMatcher(self._tokenizer, lowered(source), log_level=0, limits=parser_limits())
            if matcher.is_error():
                raise RequestError(f"the grammar was refused: {matcher.get_error()[:300]}", field="response_format")
            self._compiled[source] = matcher
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return lambda: GrammarConstraint(matcher.deep_copy(), self._vocab_size, self._end_ids)
