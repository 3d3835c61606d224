"""Increment: a chunk of a streamed completion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .request import Output
from .sampler import TokenLogprob

if TYPE_CHECKING:
    from ..reading.answer import Answer
    from ..reading.parts import ToolCall


class Increment(str):
    """The text that became safe to show since the last increment, as a str with attributes.

    token_ids: the new token, or empty. An increment may have a token and no text (half a character, the end token), or
    text and no token (text that was held back). finish_reason: None except in the last increment, see Completion.
    logprobs: of the token; None if not wanted. In a conversation, the text is for the user, reasoning is what the model
    thinks, and tool_calls are those that this increment completes.
    """

    __slots__ = ("finish_reason", "logprobs", "reasoning", "token_ids", "tool_calls")

    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprob, ...] | None
    reasoning: str
    tool_calls: tuple[ToolCall, ...]

    @property
    def text(self) -> str:
        """The text as a plain string."""
        return str(self)

    def __repr__(self) -> str:
        return f"Increment({str(self)!r}, token_ids={self.token_ids}, finish_reason={self.finish_reason!r})"

    @classmethod
    def of(cls, output: Output) -> Increment:
        """The increment of an output of a request."""
        made = cls(output.text)
        made.token_ids = () if output.token_id is None else (output.token_id,)
        made.finish_reason = output.finish_reason
        made.logprobs = None if output.logprob is None else (output.logprob,)
        made.reasoning, made.tool_calls = "", ()
        return made

    def read_by(self, answer: Answer | None) -> Increment:
        """The increment split into text, thoughts and calls by a reader; answer None: unchanged."""
        if answer is None:
            return self
        told = answer.push(self, self.finish_reason)
        made = Increment(told.text)
        made.token_ids, made.logprobs = self.token_ids, self.logprobs
        made.reasoning, made.tool_calls, made.finish_reason = told.reasoning, told.calls, told.reason
        return made
