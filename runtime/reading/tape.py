"""Tape: streamed text, and readers of it that wait for more text when they need it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # a generator that waits for more text at every yield

_IN_STRING = re.compile(r'["\\]')
_IN_VALUE = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(r"[\s,\]}<\[]")


class Tape:
    """A buffer of text. text: what has arrived and is not taken yet. ended: whether nothing more follows."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._kept: list[str] | None = None

    def feed(self, piece: str) -> None:
        """Append a chunk of text."""
        self.text += piece

    def take(self, count: int) -> str:
        """Take up to `count` of the next characters."""
        taken, self.text = self.text[:count], self.text[count:]
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    # -- backtracking ------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Remember what is taken from now on, so that it can be put back."""
        self._kept = []

    def put_back(self) -> None:
        """Put back in front of the text what was taken since `keep`."""
        self.text = "".join(self._kept or ()) + self.text
        self._kept = None

    def forget(self) -> None:
        """Drop what was taken since `keep`, so that it cannot be put back."""
        self._kept = None

    # -- waiting -----------------------------------------------------------------------------------------------------

    def more(self) -> Reading[bool]:
        """Wait for more text; False if the tape has ended."""
        size = len(self.text)
        while len(self.text) == size and not self.ended:
            yield
        return len(self.text) > size

    def peek(self, count: int = 1) -> Reading[str]:
        """The next `count` characters, fewer at the end; they are not taken."""
        while len(self.text) < count and (yield from self.more()):
            pass
        return self.text[:count]

    def blanks(self) -> Reading[str]:
        """Take white space, and return it."""
        taken = ""
        while (yield from self.peek()) and self.text[0].isspace():
            taken += self.take(len(self.text) - len(self.text.lstrip()))
        return taken

    def starts(self, mark: str) -> Reading[bool]:
        """Whether a mark comes next."""
        while len(self.text) < len(mark) and mark.startswith(self.text) and (yield from self.more()):
            pass
        return self.text.startswith(mark)

    def skip(self, mark: str) -> Reading[bool]:
        """Take a mark if it comes next; whether it did."""
        if found := (yield from self.starts(mark)):
            self.take(len(mark))
        return found

    def until(self, marks: Collection[str], give: Callable[[str], None]) -> Reading[str]:
        """Pass on the text before the first of the marks, as it arrives; returns the mark, which is not taken, or "" at
        the end."""
        while True:
            found = min(((at, -len(mark), mark) for mark in marks if (at := self.text.find(mark)) >= 0), default=None)
            if found is not None:
                give(self.take(found[0]))
                return found[2]
            held = max((overlap(self.text, mark) for mark in marks), default=0)
            if safe := len(self.text) - held:
                give(self.take(safe))
            if not (yield from self.more()):
                give(self.take(len(self.text)))
                return ""


def overlap(text: str, mark: str) -> int:
    """The length of the longest ending of `text` that is a proper prefix of `mark`."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


# -- JSON ------------------------------------------------------------------------------------------------------------


def copy_value(tape: Tape, give: Callable[[str], None]) -> Reading[bool]:
    """Pass on the text of one JSON value as it arrives; whether it is complete. The content of brackets is not
    checked."""
    first = yield from tape.peek()
    if first == '"':
        return (yield from copy_string(tape, give))
    if first in ("{", "["):
        return (yield from _copy_nested(tape, give))
    while True:
        found = _AFTER_SCALAR.search(tape.text)
        give(tape.take(found.start() if found else len(tape.text)))
        if found:
            return True
        if not (yield from tape.more()):
            return True


def copy_string(tape: Tape, give: Callable[[str], None]) -> Reading[bool]:
    """Pass on the text of a JSON string with its quotes; whether it is complete."""
    give(tape.take(1))
    while True:
        found = _IN_STRING.search(tape.text)
        if found and found[0] == '"':
            give(tape.take(found.end()))
            return True
        if found and len(tape.text) > found.end():  # an escape with the escaped character
            give(tape.take(found.end() + 1))
            continue
        give(tape.take(found.start() if found else len(tape.text)))
        if not (yield from tape.more()):
            give(tape.take(len(tape.text)))
            return False


def _copy_nested(tape: Tape, give: Callable[[str], None]) -> Reading[bool]:
    depth = 0
    while True:
        found = _IN_VALUE.search(tape.text)
        if found is None:
            give(tape.take(len(tape.text)))
            if not (yield from tape.more()):
                return False
        elif found[0] == '"':
            give(tape.take(found.start()))
            if not (yield from copy_string(tape, give)):
                return False
        else:
            depth += 1 if found[0] in "{[" else -1
            give(tape.take(found.end()))
            if depth == 0:
                return True


def read_string(tape: Tape) -> Reading[str | None]:
    """The value of a JSON string; None if it is no JSON string."""
    pieces: list[str] = []
    if not (yield from copy_string(tape, pieces.append)):
        return None
    try:
        value = json.loads("".join(pieces), strict=False)
    except ValueError:
        return None
    return as_text(value)


def as_text(value: str) -> str:
    """A string with lone surrogates, which cannot be encoded, replaced by U+FFFD."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
