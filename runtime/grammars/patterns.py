"""Regular expressions of JSON Schema (ECMA-262) as expressions over the characters of a JSON string.

Every character has one way to be written in a JSON string here (`encoded`), so that complement and intersection of
languages of strings are those of their encodings. Expressions are terminals of llguidance's Lark: `/Rust regex/`,
joined by blanks, `|`, `&` and `~`.

Implementations of ECMA-262 differ in what \\d, \\w, \\s, `.` and $ match outside ASCII and at a last line end. An
expression is strict, matching what all of them match, or loose, what any of them matches; a complement is of a loose
one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

from ..errors import RequestError

# what a JSON string holds: characters as they are, and escapes where they must be
_PLAIN = '[^"\\\\\\x00-\\x1F\\x7F]'
_CHARACTER = f'(?:{_PLAIN}|\\\\(?:["\\\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f]|7f)))'
_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ESCAPED = {chr(code): _SHORT.get(chr(code), f"\\u{code:04x}") for code in [*range(32), 34, 92, 127]}

ANY = f"/{_CHARACTER}*/"  # any string
_MAX_REPEAT = 10_000
_MAX_EXPRESSION = 200_000  # characters

Range = tuple[int, int]
_DIGITS: tuple[Range, ...] = ((48, 57),)
_WORD: tuple[Range, ...] = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: tuple[Range, ...] = (
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
_LOOSE_SPACE: tuple[Range, ...] = (*_SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF))
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_NAMED = re.compile(r"\\[pP](?:\{[^}]*\}|.)")
_PROPERTY = re.compile(r"\{\^?[A-Za-z_]+(=[A-Za-z_]+)?\}|[A-Z]")


def encoded(text: str) -> str:
    """A text as it stands in a JSON string, without the quotation marks."""
    return "".join(_ESCAPED.get(char, char) for char in text)


def between(least: int | None, most: int | None) -> str:
    """Strings of so many characters."""
    if not least and most is None:
        return ANY
    return f"/{_CHARACTER}{{{least or 0},{'' if most is None else most}}}/"


def compiled(pattern: str, loose: bool = False) -> str:
    """The strings in which a pattern is found. RequestError if it is none, or uses what no automaton can do."""
    expression = _found(_Parser(pattern, loose).parse(), loose)
    if len(expression) > _MAX_EXPRESSION:
        raise _refused(pattern, "it is too large")
    return expression


def _refused(pattern: str, reason: str) -> RequestError:
    return RequestError(f"the pattern {pattern[:80]!r} was refused: {reason}", field="response_format")


# -- syntax ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Characters:
    """One character of a set: code points, what Rust calls the same (`\\p{L}`), and further sets."""

    ranges: tuple[Range, ...]
    named: str = ""
    negated: bool = False
    members: tuple[_Characters, ...] = ()

    def regex(self) -> str:
        """As Rust has it, in the encoding."""
        body = self._body()
        if not body.removeprefix("^"):  # [] is nothing, [^] anything
            return _CHARACTER if self.negated else "[a&&b]"
        escapes = [re.escape(escape) for char, escape in _ESCAPED.items() if self._has(char)]
        parts = [f"[[{body}]&&{_PLAIN}]", *escapes] if self._has_plain else escapes
        return f"(?:{'|'.join(parts)})" if parts else "[a&&b]"

    @property
    def single(self) -> int | None:
        """The code point, if it is one."""
        one = not self.named and not self.negated and not self.members and len(self.ranges) == 1
        return self.ranges[0][0] if one and self.ranges[0][0] == self.ranges[0][1] else None

    @property
    def _has_plain(self) -> bool:
        """Whether it may have a character that is not escaped."""
        if self.named or self.negated or self.members:
            return True
        return any(
            chr(code) not in _ESCAPED for low, high in self.ranges for code in range(low, min(high, low + 40) + 1)
        )

    def _body(self) -> str:
        ranges = "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in self.ranges)
        members = "".join(f"[{member._body()}]" for member in self.members)
        return f"{'^' if self.negated else ''}{ranges}{self.named}{members}"

    def _has(self, char: str) -> bool:
        inside = any(low <= ord(char) <= high for low, high in self.ranges)
        inside = inside or (bool(self.named) and any(_named_has(name, char) for name in _NAMED.findall(self.named)))
        return (inside or any(member._has(char) for member in self.members)) != self.negated


@dataclass(frozen=True)
class _Sequence:
    parts: tuple[_Node, ...] = ()


@dataclass(frozen=True)
class _Choice:
    branches: tuple[_Sequence, ...]


@dataclass(frozen=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None


@dataclass(frozen=True)
class _Look:
    """What follows does (not) begin so."""

    branches: _Choice
    negated: bool


@dataclass(frozen=True)
class _Edge:
    """The beginning or the end of the string."""

    end: bool


_Node = _Characters | _Sequence | _Choice | _Repeat | _Look | _Edge


def _named_has(name: str, char: str) -> bool:
    """Whether `\\p{name}` has one of the characters that are escaped: controls, the quotation mark, the backslash."""
    kind = name[2:].strip("{}")
    kind = kind.partition("=")[2] or kind
    control = char not in '"\\'
    if kind in ("C", "Other", "Cc", "Control", "cntrl"):
        inside = control
    elif kind in ("P", "Punctuation", "punct", "Po", "Other_Punctuation"):
        inside = not control
    else:
        inside = kind in ("Any", "ASCII", "Common", "Zyyy")
    return inside != name.startswith("\\P")


@dataclass
class _Parser:
    """A recursive-descent parser of the syntax with the flag u, lenient in what it takes for a literal."""

    pattern: str
    loose: bool
    at: int = field(default=0)

    def parse(self) -> _Choice:
        choice = self._choice()
        if self.at < len(self.pattern):
            self._fail("unbalanced parentheses")
        return choice

    def _fail(self, reason: str) -> NoReturn:
        raise _refused(self.pattern, reason)

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

    def _choice(self) -> _Choice:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return _Choice(tuple(branches))

    def _sequence(self) -> _Sequence:
        parts: list[_Node] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self._repeats(self._atom()))
        return _Sequence(tuple(parts))

    def _repeats(self, part: _Node) -> _Node:
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
        self._take("?")  # lazy or not, the same strings match
        if isinstance(part, _Edge):
            return part if bounds[0] else _Sequence()
        return self._repeats(_Repeat(part, *bounds))

    def _atom(self) -> _Node:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._set()
        if char == ".":
            lines = ((10, 10),) if self.loose else ((10, 10), (13, 13), (0x2028, 0x2029))
            return _Characters(lines, negated=True)
        if char in "^$":
            return _Edge(char == "$")
        if char in "*+?":
            self._fail("nothing to repeat")
        if char == "\\":
            if self._take("b") or self._take("B"):
                self._fail("word boundaries are not supported")
            if self._take("A"):
                return _Edge(False)
            if self._take("Z") or self._take("z"):
                return _Edge(True)
            return self._escape()
        return _Characters(((ord(char), ord(char)),))

    def _group(self) -> _Node:
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
        return choice if look is None else _Look(choice, look)

    def _set(self) -> _Characters:
        negated = self._take("^")
        self.loose ^= negated  # the complement of a loose set is a strict one
        ranges: list[Range] = []
        members: list[_Characters] = []
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
        return _Characters(tuple(ranges), "", negated, tuple(members))

    def _member(self) -> _Characters:
        char = self._next()
        if char != "\\":
            return _Characters(((ord(char), ord(char)),))
        if self._take("b"):
            return _Characters(((8, 8),))
        return self._escape()

    def _escape(self) -> _Characters:
        char = self._next()
        if char in "dDwWsS":
            return self._shorthand(char)
        if char in "pP":
            found = _PROPERTY.match(self.pattern, self.at)
            if found is None:
                self._fail("a property of characters is none")
            self.at = found.end()
            kind = found[0].strip("{}").replace("Script=", "").replace("General_Category=", "").replace("gc=", "")
            return _Characters((), f"\\{char}{{{kind}}}")
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
        return _Characters(((code, code),))

    def _hexadecimal(self, digits: int) -> int | None:
        """The code point after \\x or \\u, of two escapes where these are a surrogate pair; None if there is none."""
        found = re.compile(rf"\{{([0-9a-fA-F]{{1,6}})\}}|([0-9a-fA-F]{{{digits}}})").match(self.pattern, self.at)
        if found is None:
            return None
        self.at, code = found.end(), int(found[1] or found[2], 16)
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.pattern, self.at)
        if 0xD800 <= code < 0xDC00 and low is not None:
            self.at = low.end()
            return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        return code

    def _shorthand(self, char: str) -> _Characters:
        """\\d, \\w or \\s, or their complements; which is wide and which narrow is told in the module's docstring."""
        negated = char.isupper()
        if char in "sS":
            return _Characters(_SPACE if self.loose == negated else _LOOSE_SPACE, negated=negated)
        ranges = _DIGITS if char in "dD" else _WORD
        wide = "\\p{Nd}" if char in "dD" else "\\p{L}\\p{M}\\p{N}"
        return _Characters(ranges, wide if self.loose != negated else "", negated)


# -- languages -------------------------------------------------------------------------------------------------------


def _found(choice: _Choice, loose: bool) -> str:
    """The strings somewhere in which one branch matches."""
    return _any_of([_from_start(list(branch.parts), loose) for branch in choice.branches])


def _from_start(parts: list[_Node], loose: bool) -> str:
    if parts and isinstance(parts[0], _Edge) and not parts[0].end:
        return _to_end(parts[1:], loose)
    if parts and (opened := _opened(parts[0])) is not None:
        return _any_of([_from_start([*branch, *parts[1:]], loose) for branch in opened])
    return f"{ANY} {_to_end(parts, loose)}"


def _to_end(parts: list[_Node], loose: bool) -> str:
    """The strings that begin with a match of the parts."""
    plain = ""
    for at, part in enumerate(parts):
        rest = parts[at + 1 :]
        if isinstance(part, _Edge):
            if not part.end:
                raise RequestError("a pattern has ^ after its beginning", field="response_format")
            if any(not isinstance(other, _Edge) for other in rest):
                raise RequestError("a pattern has $ before its end", field="response_format")
            return _slashed(plain + ("(?:\\\\n)?" if loose else ""))
        if isinstance(part, _Look):
            ahead = _any_of([_to_end(list(branch.parts), loose != part.negated) for branch in part.branches.branches])
            if part.negated:
                ahead = f"~{ahead}"
            return f"({_slashed(plain)} ({ahead} & {_to_end(rest, loose)} & {ANY}))"
        if (opened := _opened(part)) is not None:
            return f"({_slashed(plain)} {_any_of([_to_end([*branch, *rest], loose) for branch in opened])})"
        plain += _regex(part)
    return _slashed(f"{plain}{_CHARACTER}*")


def _opened(part: _Node) -> list[tuple[_Node, ...]] | None:
    """The ways through a group that has edges or looks inside; None if it has none."""
    if isinstance(part, _Characters | _Edge | _Look) or not _has_edges(part):
        return None
    if isinstance(part, _Sequence):
        return [part.parts]
    if isinstance(part, _Choice):
        return [branch.parts for branch in part.branches]
    if part.most == 1:
        return [(part.part,)] if part.least else [(), (part.part,)]
    raise RequestError("a pattern repeats a group with ^, $ or a lookahead inside", field="response_format")


def _has_edges(part: _Node) -> bool:
    if isinstance(part, _Edge | _Look):
        return True
    if isinstance(part, _Sequence):
        return any(map(_has_edges, part.parts))
    if isinstance(part, _Choice):
        return any(map(_has_edges, part.branches))
    return isinstance(part, _Repeat) and _has_edges(part.part)


def _regex(part: _Node) -> str:
    if isinstance(part, _Characters):
        return part.regex()
    if isinstance(part, _Sequence):
        return "".join(map(_regex, part.parts))
    if isinstance(part, _Choice):
        return f"(?:{'|'.join(map(_regex, part.branches))})"
    assert isinstance(part, _Repeat)
    bounds = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(
        (part.least, part.most), f"{{{part.least},{'' if part.most is None else part.most}}}"
    )
    return f"(?:{_regex(part.part)}){bounds}"


def _any_of(expressions: list[str]) -> str:
    return f"({' | '.join(expressions)})"


def _slashed(regex: str) -> str:
    return '""' if not regex else "/" + regex.replace("/", "\\/") + "/"
