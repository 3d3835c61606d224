"""The parts of an answer, in their order: text, thoughts, and tool calls."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The beginning of a call; its arguments follow. index: from 0 in each answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A chunk of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Said | Thought | CallBegun | CallArguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model. arguments: JSON text as the model wrote it; it may be incomplete if the answer was cut
    off."""

    id: str
    name: str
    arguments: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """The call in an assistant's message, in the form of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


_MARK_BEGUN = re.compile(r"[<\[][^<>\[\]\s]{0,40}$")


def any_id(name: str, index: int) -> str:
    """A random id in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"


class Parts:
    """Collects the parts of one answer that readers find; `take` returns those since its last call.

    names: of the tools that may be called. most: how many calls are wanted, after which all text is dropped; None: any
    number. hidden: texts that are not shown, such as end tokens. make_id: makes a call's id from its name and index.
    White space next to calls and thoughts is dropped, too.
    """

    def __init__(
        self,
        names: Collection[str] = (),
        most: int | None = None,
        hidden: Collection[str] = (),
        make_id: Callable[[str, int], str] = any_id,
    ) -> None:
        self.names = frozenset(names)
        self.calls = 0
        self.thinking = False  # whether a thought is open
        self._most, self._make_id = most, make_id
        self._hidden = re.compile("|".join(map(re.escape, sorted(hidden, key=len, reverse=True)))) if hidden else None
        self._parts: list[Part] = []
        self._blanks = {Said: "", Thought: ""}
        self._held = {Said: "", Thought: ""}  # text that may be the beginning of a hidden text
        self._fresh = {Said: False, Thought: True}  # whether the next white space is next to a call or thought
        self._ending = self._spoken = False

    @property
    def full(self) -> bool:
        """Whether all calls that are wanted have ended."""
        return self._ending

    def take(self) -> list[Part]:
        """The parts since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def say(self, text: str) -> None:
        """Add text of the answer, unless all wanted calls have ended."""
        if not self._ending:
            self._add(Said, text)

    def begin_thought(self) -> None:
        """Begin a thought."""
        self.thinking = True

    def think(self, text: str) -> None:
        """Add text of a thought."""
        self._add(Thought, text)

    def end_thought(self) -> None:
        """End a thought: white space before the following text, and before further thoughts, is dropped."""
        self.thinking = False
        self._blanks[Thought] = "\n"
        self._fresh[Said] = self._fresh[Thought] = True

    def begin(self, name: str) -> None:
        """Begin a call. Text after the call begins a new line if there was text before."""
        self._blanks[Said] = "\n" if self._spoken else ""
        self._fresh[Said] = True
        self._parts.append(CallBegun(self.calls, self._make_id(name, self.calls), name))
        self.calls += 1

    def argue(self, text: str) -> None:
        """Add a chunk of the arguments of the last call."""
        if text:
            self._parts.append(CallArguments(self.calls - 1, text))

    def end_call(self, whole: bool) -> None:
        """End the last call. whole: whether it is complete, and not cut off by the end of the answer."""
        self._ending = whole and self._most is not None and self.calls >= self._most

    def end(self) -> None:
        """End the answer: white space that was held back is shown, unless it is next to a call or thought."""
        if held := self._held[Said]:
            self._hidden = None
            self._add(Said, held)
        blanks, self._blanks[Said] = self._blanks[Said], ""
        if blanks and not self._fresh[Said]:
            self._parts.append(Said(blanks))

    def _add(self, kind: type[Said | Thought], text: str) -> None:
        if self._hidden is not None:
            text = self._hidden.sub("", self._held[kind] + text)
            held = _MARK_BEGUN.search(text)
            text, self._held[kind] = (text[: held.start()], held[0]) if held else (text, "")
        if self._fresh[kind]:
            text = text.lstrip()
        if not text:
            return
        self._fresh[kind] = False
        text = self._blanks[kind] + text
        shown = text.rstrip()
        self._blanks[kind] = text[len(shown) :]
        if shown:
            self._spoken = self._spoken or kind is Said
            self._parts.append(kind(shown))
