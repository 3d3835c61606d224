"""Fill in the middle: a completion between a prompt and a suffix, with the special tokens that models have for it."""

from __future__ import annotations

from ...tokenizer import Tokenizer

# marks before the prompt, between prompt and suffix, and before the completion
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)


def fill_marks(tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    """The token ids of the marks; None if the vocabulary has none."""
    for marks in _MARKS:
        found = [tokenizer.token_id(mark) for mark in marks]
        if None not in found:
            return found[0], found[1], found[2]  # type: ignore[return-value]
    return None
