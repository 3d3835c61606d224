"""Increment: a piece of a completion, as it comes."""

from __future__ import annotations

from .request import Output
from .sampler import TokenLogprob


class Increment(str):
    """The text that became safe to show since the last increment, which it is itself, and where it comes from.

    token_ids: the new token, or none; a piece may have a token and no text (half a character, the end token), and text
    and no token (what was held back). finish_reason: None but in the last one, see Completion. logprobs: of the token,
    if wanted.
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
    def of(cls, output: Output) -> Increment:
        """What an output of a request gives."""
        made = cls(output.text)
        made.token_ids = () if output.token_id is None else (output.token_id,)
        made.finish_reason = output.finish_reason
        made.logprobs = None if output.logprob is None else (output.logprob,)
        return made
