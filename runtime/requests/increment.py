"""Increment: a piece of a completion, as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .request import Output
from .sampler import TokenLogprob

if TYPE_CHECKING:
    from ..reading.answer import Answer
    from ..reading.parts import ToolCall


class Increment(str):
    """The text that became safe to show since the last increment, which it is itself, and where it comes from.

    token_ids: the new token, or none; a piece may have a token and no text (half a character, the end token), and text
    and no token (what was held back). finish_reason: None but in the last one, see Completion. logprobs: of the token,
    if wanted. Of a conversation the text is what is said to the user; reasoning is what the model thinks, and
    tool_calls are those that are whole with this piece.
    """

    __slots__ = ("finish_reason", "logprobs", "reasoning", "token_ids", "tool_calls")

    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprob, ...] | None
    reasoning: str
    tool_calls: tuple[ToolCall, ...]

    @property
    def text(self) -> str:
        """The piece as a plain string."""
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
        made.reasoning, made.tool_calls = "", ()
        return made

    def read_by(self, answer: Answer | None) -> Increment:
        """What it tells of an answer that is read."""
        if answer is None:
            return self
        told = answer.push(self, self.finish_reason)
        made = Increment(told.text)
        made.token_ids, made.logprobs = self.token_ids, self.logprobs
        made.reasoning, made.tool_calls, made.finish_reason = told.reasoning, told.calls, told.reason
        return made
