"""What an answer consists of, in the order in which it comes: words, thoughts, and calls of tools."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Said:
    """Words for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call begins: the first of an answer has index 0. Its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Said | Thought | CallBegun | CallArguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model wants. `arguments` is JSON text as the model wrote it: of an answer that was cut
    off it may be no JSON."""

    id: str
    name: str
    arguments: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """The call as a part of an assistant's message, as OpenAI's API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


_MARK_BEGUN = re.compile(r"[<\[][^<>\[\]\s]{0,40}$")


def any_id(name: str, index: int) -> str:
    """An id as OpenAI makes them."""
    return f"call_{uuid.uuid4().hex[:24]}"


class Parts:
    """Takes the parts of one answer as readers find them; `take` gives those that came since the last call.

    names: of the tools that may be called. most: calls that are wanted; after the last of them nothing is taken.
    hidden: texts that are not shown, such as end tokens. make_id: gives a call an id, by its name and index. Blanks at
    the edges of calls and thoughts are not shown either.
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
        self.thinking = False  # whether a thought is under way
        self._most, self._make_id = most, make_id
        self._hidden = re.compile("|".join(map(re.escape, sorted(hidden, key=len, reverse=True)))) if hidden else None
        self._parts: list[Part] = []
        self._blanks = {Said: "", Thought: ""}
        self._held = {Said: "", Thought: ""}  # what may begin a hidden text
        self._fresh = {Said: False, Thought: True}  # whether blanks that come now are at an edge
        self._ending = self._spoken = False

    @property
    def full(self) -> bool:
        """Whether as many calls as are wanted have ended."""
        return self._ending

    def take(self) -> list[Part]:
        """The parts since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def say(self, text: str) -> None:
        """Add words of the answer, unless it is ending."""
        if not self._ending:
            self._add(Said, text)

    def begin_thought(self) -> None:
        """A thought begins."""
        self.thinking = True

    def think(self, text: str) -> None:
        """Add words of thoughts, unless it is ending."""
        self._add(Thought, text)

    def end_thought(self) -> None:
        """The words that follow begin anew, and so do further thoughts."""
        self.thinking = False
        self._blanks[Thought] = "\n"
        self._fresh[Said] = self._fresh[Thought] = True

    def begin(self, name: str) -> None:
        """A call begins. Words after it begin a line of their own, if there were words before."""
        self._blanks[Said] = "\n" if self._spoken else ""
        self._fresh[Said] = True
        self._parts.append(CallBegun(self.calls, self._make_id(name, self.calls), name))
        self.calls += 1

    def argue(self, text: str) -> None:
        """A piece of the arguments of the call that began last."""
        if text:
            self._parts.append(CallArguments(self.calls - 1, text))

    def end_call(self, whole: bool) -> None:
        """The call that began last has ended; not whole, if the answer was cut off in it."""
        self._ending = whole and self._most is not None and self.calls >= self._most

    def end(self) -> None:
        """The answer has ended: blanks that were held back are shown, unless they are at an edge."""
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
