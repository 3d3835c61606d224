"""Grammars as token masks, for one tokenizer.

Why llguidance and not xgrammar: it has no dependencies, while xgrammar 0.2.8 requires torch, transformers and triton,
which the runtime must not need; and it computes masks lazily within a limit of work, so that no grammar can delay a
step for long. `benchmarks/NOTES.md` has the comparison.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..errors import RequestError
from ..format.forms import CompiledForm
from .compiling import LoweredGrammar, lowered
from .following import Checks, JsonFollower, is_structural
from .limits import parser_limits

if TYPE_CHECKING:
    import llguidance

_MOST_TRIES = 300  # tokens tried in a search for how an item can be completed
_CACHED = 64  # compiled grammars in the cache, least recently used evicted first; each takes at most a few hundred KiB


class GrammarVocabulary:
    """The tokens of one tokenizer for grammars: their bytes, and which of them end an answer."""

    def __init__(self, tokenizer_json: str, size: int, end_ids: Sequence[int]) -> None:
        import llguidance

        self.size, self.end_ids = size, list(end_ids)
        self.tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=size, eos_token=self.end_ids)

    def text(self, token_id: int) -> bytes:
        """The bytes of a token; b"" for a token that ends an answer."""
        return b"" if token_id in self.end_ids else self.tokenizer.decode_bytes([token_id])

    @cached_property
    def structural(self) -> np.ndarray:
        """The ids of tokens that may open or close a JSON value, int64 `[tokens]`."""
        return np.array([token for token in range(self.size) if is_structural(self.text(token))], dtype=np.int64)


class GrammarConstraint:
    """One completion's state in its grammar, and in its JSON if it must follow schemas."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: GrammarVocabulary, checks: Checks | None) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._follower = None if checks is None else JsonFollower(checks)
        self._distinct = checks is not None and checks.distinct
        self._words = np.zeros(-(-vocabulary.size // 32), dtype=np.uint32)
        self._refused = False
        self._tries = 0

    def allowed(self) -> np.ndarray:
        """The allowed tokens, bool `[vocab]`: none after the matcher failed (limits, or a token it did not allow), and
        no end token while the answer is incomplete. `accept` may still refuse some of them; after such a refusal the
        mask is exact."""
        bits = self._mask(self._matcher)
        if self._refused and self._follower is not None:
            for token in self._doubtful(bits, self._follower):
                bits[token] = self._after(token) is not None
        return bits

    def accept(self, token_id: int) -> bool:
        """Advance by an allowed token. False, with the state unchanged, if the token is refused after all; `allowed`
        then leaves it out."""
        if self._distinct or token_id in self._vocabulary.end_ids:
            after = self._after(token_id)
            if after is not None:
                self._matcher, self._follower = after
            self._refused = after is None
        else:
            self._refused = self._follower is not None and not self._follower.feed(self._vocabulary.text(token_id))
            if not self._refused:
                self._matcher.consume_token(token_id)
        return not self._refused

    def copy(self) -> GrammarConstraint:
        """A copy for another completion in the same state."""
        other = copy(self)
        other._matcher, other._words = self._matcher.deep_copy(), self._words.copy()
        other._follower = None if self._follower is None else self._follower.copy()
        return other

    def _after(self, token_id: int) -> tuple[llguidance.LLMatcher, JsonFollower | None] | None:
        """The state after an allowed token; None if the token must be refused."""
        matcher, follower = self._matcher.deep_copy(), self._follower
        if token_id in self._vocabulary.end_ids:
            return (matcher, follower) if follower is None or follower.finish() else None
        matcher.consume_token(token_id)
        if follower is None:
            return matcher, None
        follower = follower.copy()
        if not follower.feed(self._vocabulary.text(token_id)):
            return None
        self._tries = _MOST_TRIES
        return (matcher, follower) if self._leads_on(matcher, follower) else None

    def _leads_on(self, matcher: llguidance.LLMatcher, follower: JsonFollower) -> bool:
        """Whether an item that begins like an earlier one can still become a different item: a search; True if it runs
        out of tries."""
        if not follower.is_pressed():
            return True
        for token in np.flatnonzero(self._mask(matcher)):
            self._tries -= 1
            if self._tries < 0:
                return True
            following = follower.copy()
            if not following.feed(self._vocabulary.text(int(token))):
                continue
            if not following.is_pressed():
                return True
            after = matcher.deep_copy()
            after.consume_token(int(token))
            if self._leads_on(after, following):
                return True
        return False

    def _doubtful(self, bits: np.ndarray, follower: JsonFollower) -> list[int]:
        """The allowed tokens that `accept` may refuse."""
        few = np.zeros(len(bits), dtype=bool)
        few[self._vocabulary.structural] = few[self._vocabulary.end_ids] = True
        pressed = follower.is_pressed()
        return [
            int(token)
            for token in np.flatnonzero(bits)
            if few[token] or (pressed and follower.is_pressed(self._vocabulary.text(int(token))))
        ]

    def _mask(self, matcher: llguidance.LLMatcher) -> np.ndarray:
        if matcher.is_error():
            return np.zeros(self._vocabulary.size, dtype=bool)
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")[: self._vocabulary.size].view(bool)
        if not matcher.is_accepting():  # a grammar that derives no text would allow the end at once
            bits[self._vocabulary.end_ids] = False
        return bits


class Grammars:
    """Compiles grammars for the tokenizer of one engine. llguidance works without the GIL.

    tokenizer_json: the text of the file. end_ids: the tokens that end an answer. forms: the engine's lowered forms,
    which are never evicted once compiled. Thread-safe.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int], forms: Sequence[CompiledForm] = ()
    ) -> None:
        self._source = tokenizer_json, vocab_size, list(end_ids)
        self._vocabulary: GrammarVocabulary | None = None
        self._lowered = {form.asked: form.lowered for form in forms}
        self._kept = {*self._lowered.values()}
        self._compiled: OrderedDict[str, tuple[llguidance.LLMatcher, Checks | None]] = OrderedDict()
        self._working = Lock()

    def prepare(self) -> None:
        """Compile all forms and the mask of each form's first token in advance. A form that cannot be compiled is
        refused when a request asks for it."""
        for lowered_form in self._lowered.values():
            with suppress(RequestError):
                self.compile(lowered_form)().allowed()

    def compile(self, source: str) -> Callable[[], GrammarConstraint]:
        """Compile a text of `sources`, lowered or not, to a factory of constraints, one per completion. RequestError if
        it is no grammar or exceeds the limits, or if the tokenizer's tokens cannot be turned into bytes."""
        with self._working:
            return self._compile(self._lowered.get(source, source))

    def _compile(self, source: str) -> Callable[[], GrammarConstraint]:
        import llguidance

        if self._vocabulary is None:
            try:
                self._vocabulary = GrammarVocabulary(*self._source)
            except ValueError as error:  # the tokenizer's tokens cannot be turned into bytes
                reason = f"grammars cannot read the model's tokenizer: {str(error)[:300]}"
                raise RequestError(reason, "leave the grammar out", field="response_format") from error
        vocabulary = self._vocabulary
        if source not in self._compiled:
            found = msgspec.json.decode(lowered(source), type=LoweredGrammar)
            matcher = llguidance.LLMatcher(vocabulary.tokenizer, found.grammar, log_level=0, limits=parser_limits())
            if matcher.is_error():
                raise RequestError(f"the grammar was refused: {matcher.get_error()[:300]}", field="response_format")
            facts = (found.whole, found.distinct, found.close, found.deepest)
            checks = Checks(found.schemas, *facts) if found.schemas else None
            if checks is not None:  # slow for a large vocabulary: compute it now and not between two tokens
                _ = vocabulary.structural
            self._compiled[source] = matcher, checks
            if len(self._compiled) > _CACHED + len(self._kept):
                del self._compiled[next(one for one in self._compiled if one not in self._kept)]
        self._compiled.move_to_end(source)
        matcher, checks = self._compiled[source]
        return lambda: GrammarConstraint(matcher.deep_copy(), vocabulary, checks)
