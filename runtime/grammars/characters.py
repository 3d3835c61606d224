"""Characters: their encoding in a JSON string, and character sets of regular expressions.

Every character has exactly one encoding (`encoded`), so that complement and intersection of languages of strings are
those of their encodings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# the content of a JSON string: plain characters, and escapes only where they are required
PLAIN = '[^"\\\\\\x00-\\x1F\\x7F]'
CHARACTER = f'(?:{PLAIN}|\\\\(?:["\\\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f]|7f)))'
_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
ESCAPED = {chr(code): _SHORT.get(chr(code), f"\\u{code:04x}") for code in [*range(32), 34, 92, 127]}

Range = tuple[int, int]
DIGITS: tuple[Range, ...] = ((48, 57),)
WORD: tuple[Range, ...] = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACE: tuple[Range, ...] = (
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
LOOSE_SPACE: tuple[Range, ...] = (*SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF))
_NAMED = re.compile(r"\\[pP](?:\{[^}]*\}|.)")


def encoded(text: str) -> str:
    """A text as the content of a JSON string, without the quotation marks."""
    return "".join(ESCAPED.get(char, char) for char in text)


@dataclass(frozen=True)
class Characters:
    """A set of characters: code points, the same in Rust's syntax (such as `\\p{L}`), and further sets."""

    ranges: tuple[Range, ...]
    named: str = ""
    negated: bool = False
    members: tuple[Characters, ...] = ()

    def regex(self) -> str:
        """A regular expression for its characters as encoded, in Rust's syntax."""
        body = self._body()
        if not body.removeprefix("^"):  # [] matches nothing, [^] anything
            return CHARACTER if self.negated else "[a&&b]"
        escapes = [re.escape(escape) for char, escape in ESCAPED.items() if self._has(char)]
        parts = [f"[[{body}]&&{PLAIN}]", *escapes] if self._has_plain else escapes
        return f"(?:{'|'.join(parts)})" if parts else "[a&&b]"

    @property
    def single(self) -> int | None:
        """The code point, if the set has exactly one; else None."""
        one = not self.named and not self.negated and not self.members and len(self.ranges) == 1
        return self.ranges[0][0] if one and self.ranges[0][0] == self.ranges[0][1] else None

    @property
    def _has_plain(self) -> bool:
        """Whether it may contain a character that is not escaped."""
        if self.named or self.negated or self.members:
            return True
        return any(
            chr(code) not in ESCAPED for low, high in self.ranges for code in range(low, min(high, low + 40) + 1)
        )

    def _body(self) -> str:
        ranges = "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in self.ranges)
        members = "".join(f"[{member._body()}]" for member in self.members)
        return f"{'^' if self.negated else ''}{ranges}{self.named}{members}"

    def _has(self, char: str) -> bool:
        inside = any(low <= ord(char) <= high for low, high in self.ranges)
        inside = inside or (bool(self.named) and any(_named_has(name, char) for name in _NAMED.findall(self.named)))
        return (inside or any(member._has(char) for member in self.members)) != self.negated


def _named_has(name: str, char: str) -> bool:
    """Whether `\\p{name}` contains one of the escaped characters: controls, the quotation mark, the backslash."""
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
