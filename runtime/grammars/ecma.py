"""Parses JSON Schema's regular expressions (ECMA-262 with the flag u), lenient about which characters are literals.

Implementations differ in what \\d, \\w, \\s, `.` and $ match outside ASCII and at a last line end. A strict expression
matches what all of them match, a loose one what any of them matches; a complement is taken of a loose one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

from ..errors import RequestError
from .characters import DIGITS, LOOSE_SPACE, SPACE, WORD, Characters, Range

_MAX_REPEAT = 10_000
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_PROPERTY = re.compile(r"\{\^?[A-Za-z_]+(=[A-Za-z_]+)?\}|[A-Z]")


@dataclass(frozen=True)
class Sequence:
    """A concatenation of parts; with no parts it matches the empty string."""

    parts: tuple[Node, ...] = ()


@dataclass(frozen=True)
class PatternChoice:
    """Any of the branches."""

    branches: tuple[Sequence, ...]


@dataclass(frozen=True)
class PatternRepeat:
    """A part at least `least` and at most `most` times; None: any number of times."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Look:
    """A lookahead: the following text must (or must not) begin with a match."""

    branches: PatternChoice
    negated: bool


@dataclass(frozen=True)
class Edge:
    """The beginning or the end of the string."""

    end: bool


Node = Characters | Sequence | PatternChoice | PatternRepeat | Look | Edge


@dataclass
class Parser:
    """A recursive-descent parser of the syntax with the flag u, lenient about which characters are literals."""

    pattern: str
    loose: bool
    at: int = field(default=0)

    def parse(self) -> PatternChoice:
        """The syntax tree of the whole pattern. RequestError names the part that is not supported."""
        choice = self._choice()
        if self.at < len(self.pattern):
            self._fail("unbalanced parentheses")
        return choice

    def _fail(self, reason: str) -> NoReturn:
        raise refused(self.pattern, reason)

    def _take(self, text: str) -> bool:
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def _next(self) -> str:
        if self.at >= len(self.pattern):
            self._fail("it ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def _choice(self) -> PatternChoice:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return PatternChoice(tuple(branches))

    def _sequence(self) -> Sequence:
        parts: list[Node] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self._repeats(self._atom()))
        return Sequence(tuple(parts))

    def _repeats(self, part: Node) -> Node:
        bounds = None
        if self._take("*"):
            bounds = (0, None)
        elif self._take("+"):
            bounds = (1, None)
        elif self._take("?"):
            bounds = (0, 1)
        elif found := re.compile(r"\{([0-9]{1,6})(,([0-9]{0,6}))?\}").match(self.pattern, self.at):
            self.at = found.end()
            least = int(found[1])
            bounds = (least, least if found[2] is None else int(found[3]) if found[3] else None)
        if bounds is None:
            return part
        if max(bounds[0], bounds[1] or 0) > _MAX_REPEAT or (bounds[1] is not None and bounds[1] < bounds[0]):
            self._fail("a repetition is out of bounds")
        self._take("?")  # a lazy repetition matches the same strings
        if isinstance(part, Edge):
            return part if bounds[0] else Sequence()
        return self._repeats(PatternRepeat(part, *bounds))

    def _atom(self) -> Node:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._set()
        if char == ".":
            lines = ((10, 10),) if self.loose else ((10, 10), (13, 13), (0x2028, 0x2029))
            return Characters(lines, negated=True)
        if char in "^$":
            return Edge(char == "$")
        if char in "*+?":
            self._fail("nothing to repeat")
        if char == "\\":
            if self._take("b") or self._take("B"):
                self._fail("word boundaries are not supported")
            if self._take("A"):
                return Edge(False)
            if self._take("Z") or self._take("z"):
                return Edge(True)
            return self._escape()
        return Characters(((ord(char), ord(char)),))

    def _group(self) -> Node:
        look = None
        if self._take("?"):
            if self._take("=") or self._take("!"):
                look = self.pattern[self.at - 1] == "!"
            elif self._take("<=") or self._take("<!"):
                self._fail("lookbehind is not supported")
            elif self._take("P<") or self._take("<"):
                self.at = self.pattern.find(">", self.at) + 1 or len(self.pattern)
            elif not self._take(":"):
                self._fail("flags and conditions are not supported")
        choice = self._choice()
        if not self._take(")"):
            self._fail("unbalanced parentheses")
        return choice if look is None else Look(choice, look)

    def _set(self) -> Characters:
        negated = self._take("^")
        self.loose ^= negated  # the complement of a loose set is a strict one
        ranges: list[Range] = []
        members: list[Characters] = []
        while not self._take("]"):
            low = self._member()
            if low.single is None:
                members.append(low)
            elif self.pattern.startswith("-", self.at) and not self.pattern.startswith("-]", self.at):
                self.at += 1
                high = self._member()
                if high.single is None:  # [a-\d] has a hyphen
                    ranges += [(low.single, low.single), (45, 45)]
                    members.append(high)
                elif high.single < low.single:
                    self._fail("a range of characters is none")
                else:
                    ranges.append((low.single, high.single))
            else:
                ranges.append((low.single, low.single))
        self.loose ^= negated
        return Characters(tuple(ranges), "", negated, tuple(members))

    def _member(self) -> Characters:
        char = self._next()
        if char != "\\":
            return Characters(((ord(char), ord(char)),))
        if self._take("b"):
            return Characters(((8, 8),))
        return self._escape()

    def _escape(self) -> Characters:
        char = self._next()
        if char in "dDwWsS":
            return self._shorthand(char)
        if char in "pP":
            found = _PROPERTY.match(self.pattern, self.at)
            if found is None:
                self._fail("a property of characters is none")
            self.at = found.end()
            kind = found[0].strip("{}").replace("Script=", "").replace("General_Category=", "").replace("gc=", "")
            return Characters((), f"\\{char}{{{kind}}}")
        if char in "123456789k":
            self._fail("back references are not supported")
        code = _CONTROLS.get(char)
        if code is None and char in "xu":
            code = self._hexadecimal(2 if char == "x" else 4)
        elif code is None and char == "c":
            code = ord(self._next()) % 32
        if code is None:
            code = ord(char)
        if code > 0x10FFFF:
            self._fail("there is no such character")
        return Characters(((code, code),))

    def _hexadecimal(self, digits: int) -> int | None:
        """The code point after \\x or \\u, from two escapes if they are a surrogate pair; None if no digits follow."""
        found = re.compile(rf"\{{([0-9a-fA-F]{{1,6}})\}}|([0-9a-fA-F]{{{digits}}})").match(self.pattern, self.at)
        if found is None:
            return None
        self.at, code = found.end(), int(found[1] or found[2], 16)
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.pattern, self.at)
        if 0xD800 <= code < 0xDC00 and low is not None:
            self.at = low.end()
            return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        return code

    def _shorthand(self, char: str) -> Characters:
        """\\d, \\w or \\s, or their complements, as strict or loose sets (see the module's docstring)."""
        negated = char.isupper()
        if char in "sS":
            return Characters(SPACE if self.loose == negated else LOOSE_SPACE, negated=negated)
        ranges = DIGITS if char in "dD" else WORD
        wide = "\\p{Nd}" if char in "dD" else "\\p{L}\\p{M}\\p{N}"
        return Characters(ranges, wide if self.loose != negated else "", negated)


def refused(pattern: str, reason: str) -> RequestError:
    """The error for a pattern that is not supported; it shows the pattern's first 80 characters."""
    return RequestError(f"the pattern {pattern[:80]!r} was refused: {reason}", field="response_format")
