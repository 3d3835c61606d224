"""Increment: a piece of a completion, as it comes."""

from __future__ import annotations

from collections.abc import Sequence

from .request import Output
from .sampler import TokenLogprob


class Increment(str):
    """The text that became safe to show since the last increment, which it is itself, and where it comes from.

    token_ids: the new tokens; a piece may have tokens and no text (half a character, the end token), and text and no
    tokens (what was held back). finish_reason: None but in the last one, see Completion. logprobs: of the tokens, if
    wanted.
    """

    __slots__ = ("finish_reason", "logprobs", "token_ids")

    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprob, ...] | None

    @property
    def text(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"Increment({str(self)!r}, token_ids={self.token_ids}, finish_reason={self.finish_reason!r})"

    @classmethod
    def of(cls, outputs: Sequence[Output]) -> Increment:
        """What one or more successive outputs of a request give."""
        made = cls("".join(output.text for output in outputs))
        made.token_ids = tuple(output.token_id for output in outputs if output.token_id is not None)
        made.finish_reason = outputs[-1].finish_reason
        logprobs = tuple(output.logprob for output in outputs if output.logprob is not None)
        made.logprobs = logprobs or None
        return made
