"""Grammars as token masks, for one tokenizer.

llguidance rather than xgrammar: it has no dependencies at all, where xgrammar 0.2.8 requires torch, transformers and
triton, which the runtime must not need; and it computes masks lazily within limits of fuel, so that no grammar can hold
up a step for long. `benchmarks/NOTES.md` has the comparison.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..errors import RequestError
from .compiling import Lowered, lowered
from .following import Checks, Follower, is_structural
from .limits import parser_limits

if TYPE_CHECKING:
    import llguidance

_CACHED = 64  # compiled grammars kept, the least recently used goes first; each holds at most a few hundred KiB


class Vocabulary:
    """The tokens of one tokenizer, for grammars: their texts, and which of them end an answer."""

    def __init__(self, tokenizer_json: str, size: int, end_ids: Sequence[int]) -> None:
        import llguidance

        self.size, self.end_ids = size, list(end_ids)
        self.tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=size, eos_token=self.end_ids)

    def text(self, token_id: int) -> bytes:
        return b"" if token_id in self.end_ids else self.tokenizer.decode_bytes([token_id])

    @cached_property
    def structural(self) -> np.ndarray:
        """Ids of the tokens that may open or close a JSON value, int64 `[tokens]`."""
        return np.array([token for token in range(self.size) if is_structural(self.text(token))], dtype=np.int64)


class GrammarConstraint:
    """One completion's place in its grammar, and in its JSON where schemas are to be followed."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, checks: Checks | None) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._follower = None if checks is None else Follower(checks)
        self._words = np.zeros(-(-vocabulary.size // 32), dtype=np.uint32)
        self._refused = False

    def allowed(self) -> np.ndarray:
        """bool `[vocab]`; nothing is allowed after the matcher failed (its limits, or a token it did not allow), and no
        end where the answer is not complete. After a token that was not accepted, exactly those that will be."""
        if self._matcher.is_error():
            return np.zeros(self._vocabulary.size, dtype=bool)
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")[: self._vocabulary.size].view(bool)
        if not self._matcher.is_accepting():  # a grammar that nothing follows from would allow the end at once
            bits[self._vocabulary.end_ids] = False
        if self._refused:
            doubtful = [*self._vocabulary.structural, *self._vocabulary.end_ids]
            for token in doubtful:
                bits[token] = bits[token] and self._follows(int(token), Follower.may_feed)
        return bits

    def accept(self, token_id: int) -> bool:
        """Go on after an allowed token; False, and nothing has changed, if it must not come after all: then `allowed`
        is narrower."""
        if not self._follows(token_id, Follower.feed):
            self._refused = True
            return False
        self._refused = False
        if token_id not in self._vocabulary.end_ids:
            self._matcher.consume_token(token_id)
        return True

    def _follows(self, token_id: int, feed: Callable[[Follower, bytes], bool]) -> bool:
        if self._follower is None:
            return True
        if token_id in self._vocabulary.end_ids:
            return self._follower.finish()
        return feed(self._follower, self._vocabulary.text(token_id))


class Grammars:
    """Compiles grammars for the tokenizer of one engine. llguidance works without the GIL.

    tokenizer_json: the text of the file; end_ids: the tokens that end an answer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._source = tokenizer_json, vocab_size, list(end_ids)
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[str, tuple[llguidance.LLMatcher, Checks | None]] = OrderedDict()

    def compile(self, source: str) -> Callable[[], GrammarConstraint]:
        """What makes the constraint of each completion, from a text of `sources`, lowered or not. RequestError if the
        grammar is none, or one beyond the limits."""
        import llguidance

        if self._vocabulary is None:
            self._vocabulary = Vocabulary(*self._source)
        vocabulary = self._vocabulary
        if source not in self._compiled:
            found = msgspec.json.decode(lowered(source), type=Lowered)
            matcher = llguidance.LLMatcher(vocabulary.tokenizer, found.grammar, log_level=0, limits=parser_limits())
            if matcher.is_error():
                raise RequestError(f"the grammar was refused: {matcher.get_error()[:300]}", field="response_format")
            checks = Checks(found.schemas, found.whole, found.distinct, found.close) if found.schemas else None
            self._compiled[source] = matcher, checks
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        matcher, checks = self._compiled[source]
        return lambda: GrammarConstraint(matcher.deep_copy(), vocabulary, checks)
