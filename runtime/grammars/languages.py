"""Questions about terminals: whether one matches anything, and its texts if they are few."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .limits import parser_limits

if TYPE_CHECKING:
    import llguidance

_MOST_STEPS = 400  # steps of a search for all texts that an expression matches


def is_empty(expression: str) -> bool:
    """Whether a terminal matches nothing."""
    matcher = _matcher(expression)
    return matcher is not None and not matcher.is_accepting() and not len(_following(matcher))


def finite(expression: str, most: int) -> list[str] | None:
    """All texts that a terminal matches; None if there are more than `most`, or if some are long."""
    start = _matcher(expression)
    if start is None:
        return None
    found: list[str] = []
    queue: list[tuple[bytes, llguidance.LLMatcher]] = [(b"", start)]
    for _ in range(_MOST_STEPS):
        if not queue:
            return sorted(found)
        text, matcher = queue.pop()
        if matcher.is_accepting():
            found.append(text.decode(errors="replace"))
        following = _following(matcher)
        if len(found) > most or len(following) > most:
            return None
        for byte in following:
            after = matcher.deep_copy()
            after.consume_token(int(byte))
            queue.append((text + bytes([int(byte)]), after))
    return None


def _matcher(expression: str) -> llguidance.LLMatcher | None:
    """A matcher at the start of a terminal; None if it exceeds the limits, which is reported when it is used."""
    import llguidance

    grammar = llguidance.LLMatcher.grammar_from_lark(f"start: T\nT: {expression}")
    matcher = llguidance.LLMatcher(_bytes(), grammar, log_level=0, limits=parser_limits())
    return None if matcher.is_error() else matcher


def _following(matcher: llguidance.LLMatcher) -> np.ndarray:
    """The bytes that may come next, as integers [count]."""
    words = np.zeros(-(-_bytes().vocab_size // 32), dtype=np.uint32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:256])


@lru_cache(maxsize=1)
def _bytes() -> llguidance.LLTokenizer:
    """A tokenizer with one token for each byte."""
    import llguidance

    return llguidance.LLTokenizer("byte")
