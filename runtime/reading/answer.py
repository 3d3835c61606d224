"""An answer as Python callers get it: text, thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .parts import CallArguments, CallBegun, Part, Said, Thought, ToolCall
from .reader import AnswerReader

MakeReader = Callable[[], AnswerReader]


@dataclass(frozen=True, slots=True)
class Told:
    """The new parts of an answer. calls: tool calls that are now complete. reason: why the answer has ended; None if it
    has not."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    reason: str | None


class Answer:
    """Reads one answer chunk by chunk."""

    def __init__(self, make: MakeReader) -> None:
        self._reader = make()
        self._open: ToolCall | None = None  # a call whose arguments are incomplete

    def push(self, piece: str, reason: str | None) -> Told:
        """The new parts after one more chunk of text. reason: why the answer ends with this chunk; None if it
        continues. The answer also ends when it has all the calls that are wanted."""
        parts = self._reader.push(piece)
        full = self._reader.full
        if reason is not None:
            parts += self._reader.finish()
        if self._reader.calls and (full or reason == "stop"):
            reason = "tool_calls"
        text = "".join(part.text for part in parts if isinstance(part, Said))
        reasoning = "".join(part.text for part in parts if isinstance(part, Thought))
        return Told(text, reasoning, self._whole(parts, ended=reason is not None), reason)

    def _whole(self, parts: list[Part], ended: bool) -> tuple[ToolCall, ...]:
        calls: list[ToolCall] = []
        for part in parts:
            if isinstance(part, CallBegun):
                calls += [self._open] if self._open is not None else []
                self._open = ToolCall(part.id, part.name)
            elif isinstance(part, CallArguments) and self._open is not None:
                self._open = replace(self._open, arguments=self._open.arguments + part.text)
        if ended and self._open is not None:
            calls.append(self._open)
            self._open = None
        return tuple(calls)
