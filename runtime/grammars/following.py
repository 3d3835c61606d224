"""Following: checks JSON, while it is generated, for the conditions that a grammar cannot express.

The keys of an object must differ; so must the items of an array, if the schema requires it; and a value is not closed
if the schema could then no longer be satisfied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .documents import validator

if TYPE_CHECKING:
    from jsonschema_rs import ValidationError

_IN_STRING = re.compile(rb'["\\]')
_ENDS_SCALAR = b",]}"
_MOST_CHECKED = 64 << 10  # bytes; a longer value is not checked at each close, only at its end

_FINAL = ("Type", "MaxItems", "MaxProperties", "FalseSchema", "AdditionalProperties", "PropertyNames", "UniqueItems")


class Checks:
    """Schemas of which a value must follow one.

    whole: whether the whole answer is the value; if not, each object and array in it is a value, and the text between
    them is free. distinct: whether some array must not repeat an item. close: whether the rules of some schema allow
    more than the schema itself, so that each close must be checked. deepest: how many levels of objects and arrays are
    allowed, so that a check stays cheap.
    """

    def __init__(self, schemas: Sequence[Any], whole: bool, distinct: bool, close: bool, deepest: int) -> None:
        self.whole, self.distinct, self.close, self.deepest = whole, distinct, close, deepest
        self._validators = [validator(schema) for schema in schemas]

    def valid(self, value: Any) -> bool:
        """Whether a value follows one of the schemas."""
        return any(each.is_valid(value) for each in self._validators)

    def possible(self, value: Any, path: list[str | int]) -> bool:
        """Whether a value can still become valid, given that its parts along `path` are still open."""
        return any(not any(_is_final(e, path) for e in each.iter_errors(value)) for each in self._validators)


def _is_final(error: ValidationError, path: list[str | int]) -> bool:
    """Whether an error stays, whatever follows: it is in a complete part, or of a kind that no further text can
    repair."""
    place = list(error.instance_path)
    if place != path[: len(place)]:
        return True
    kind: Any = error.kind
    name = type(kind).__name__
    if name in ("AnyOf", "OneOfNotValid"):
        return all(any(_is_final(inner, path) for inner in branch) for branch in kind.context)
    return name in _FINAL


@dataclass
class _Open:
    """An object or array that is not closed yet. seen: its keys, or items, so far. name, count: the current key, and
    the number of complete values.

    written: the exact text of items that are no objects or arrays.
    """

    is_array: bool
    seen: set[str] = field(default_factory=set)
    written: set[bytes] = field(default_factory=set)
    name: str = ""
    count: int = 0


class JsonFollower:
    """One answer's state in its JSON. It relies on a grammar for the syntax."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._text = bytearray()  # the value so far
        self._stack: list[_Open] = []
        self._mode = "value" if checks.whole else "outside"
        self._start = 0  # offset of the innermost string, key or scalar
        self._escaped = False

    def feed(self, data: bytes) -> bool:
        """Advance by the next bytes. False, with the state unchanged, if they are not allowed."""
        text, before = bytes(self._text) if self._mode == "outside" else None, self._stack
        size, mode, start, escaped = len(self._text), self._mode, self._start, self._escaped
        if is_structural(data):
            self._stack = [_copied(one) for one in before]
        if self._run(data):
            return True
        if text is None:
            del self._text[size:]
        else:
            self._text[:] = text
        self._stack, self._mode, self._start, self._escaped = before, mode, start, escaped
        return False

    def copy(self) -> JsonFollower:
        """A copy in the same state."""
        other = JsonFollower(self._checks)
        other._text[:] = self._text
        other._stack = [_copied(one) for one in self._stack]
        other._mode, other._start, other._escaped = self._mode, self._start, self._escaped
        return other

    def is_pressed(self, data: bytes = b"") -> bool:
        """Whether the current item so far, plus `data`, is a prefix of an earlier item of the array, so that perhaps it
        can only become a repetition."""
        inner = self._stack[-1] if self._stack else None
        if inner is None or not inner.written or self._mode not in ("value", "scalar", "string"):
            return False
        begun = data if self._mode == "value" else bytes(self._text[self._start :]) + data
        return any(item.startswith(begun) for item in inner.written)

    def finish(self) -> bool:
        """Whether the answer may end here."""
        if self._mode == "scalar" and not self._stack:
            return self._checks.valid(self._loads(self._text))
        return self._mode in ("done", "outside", "lost")

    # -- syntax ------------------------------------------------------------------------------------------------------

    def _run(self, data: bytes) -> bool:
        at = 0
        while at < len(data):
            if self._mode in ("done", "lost"):
                return True
            if self._mode == "outside":
                at = next((i for i in range(at, len(data)) if data[i] in b"{["), len(data))
                if at == len(data):
                    return True
                self._text.clear()
                self._mode = "value"
            if self._mode in ("key", "string"):
                at = self._in_string(data, at)
                if at < 0:
                    return False
                continue
            byte = data[at : at + 1]
            if self._mode == "scalar" and byte in _ENDS_SCALAR and not self._closed():
                return False
            self._text += byte
            at += 1
            if not self._punctuated(byte):
                return False
        return True

    def _in_string(self, data: bytes, at: int) -> int:
        """The index after the string or the data, whichever ends first; -1 if the string must not end here."""
        if self._escaped:
            self._escaped = False
            self._text += data[at : at + 1]
            return at + 1
        found = _IN_STRING.search(data, at)
        end = len(data) if found is None else found.end()
        self._text += data[at:end]
        if found is None:
            return end
        if found[0] == b"\\":
            self._escaped = True
            return end
        if self._mode == "string":
            return end if self._closed() else -1
        name = self._loads(self._text[self._start :])
        inner = self._stack[-1]
        if name in inner.seen:
            return -1
        inner.seen.add(name)
        inner.name, self._mode = name, "colon"
        return end

    def _punctuated(self, byte: bytes) -> bool:
        """Handle one byte outside strings."""
        if self._mode == "scalar":
            return True
        inner = self._stack[-1] if self._stack else None
        if byte in b"]}":
            if inner is None:
                return self._lose()
            self._stack.pop()
            return self._closed()
        if byte == b"," and inner is not None:
            self._mode = "value" if inner.is_array else "name"
        elif byte == b":":
            self._mode = "value"
        elif byte == b'"':
            self._start = len(self._text) - 1
            self._mode = "key" if self._mode == "name" else "string"
        elif byte in b"{[":
            if len(self._stack) >= self._checks.deepest:
                return False
            self._stack.append(_Open(byte == b"["))
            self._mode = "value" if byte == b"[" else "name"
        elif self._mode == "value":
            self._start, self._mode = len(self._text) - 1, "scalar"
        elif byte not in b" \t\r\n":
            return self._lose()
        return True

    def _lose(self) -> bool:
        """Give up on text that is not JSON: it can no longer be checked."""
        self._mode = "outside" if not self._checks.whole else "lost"
        self._stack = []
        return True

    # -- values ------------------------------------------------------------------------------------------------------

    def _closed(self) -> bool:
        """Handle the end of a value; False if the value must not end so."""
        if not self._stack:
            self._mode = "done" if self._checks.whole else "outside"
            try:
                return self._checks.valid(self._loads(self._text))
            except ValueError:  # brackets in the text between values
                return self._lose()
        inner = self._stack[-1]
        self._mode = "after"
        inner.count += 1
        looks = self._checks.close or (inner.is_array and self._checks.distinct)
        if not looks or len(self._text) > _MOST_CHECKED:
            return True
        value, path = self._partial(), self._path()
        repeated = False
        if inner.is_array:
            items: Any = value
            for step in path:
                items = items[step]
            last = _same(items[-1])
            repeated = last in inner.seen
            inner.seen.add(last)
            if not isinstance(items[-1], dict | list):
                inner.written.add(bytes(self._text[self._start :]))
        return not (repeated or self._checks.close) or self._checks.possible(value, path)

    def _path(self) -> list[str | int]:
        """The keys and indices from the whole value to its innermost open part."""
        return [one.count if one.is_array else one.name for one in self._stack[:-1]]

    def _partial(self) -> Any:
        closing = bytes(ord("]" if one.is_array else "}") for one in reversed(self._stack))
        return self._loads(bytes(self._text) + closing)

    def _loads(self, text: bytes | bytearray) -> Any:
        return json.loads(bytes(text).decode(errors="replace"))


def _copied(one: _Open) -> _Open:
    return replace(one, seen=set(one.seen), written=set(one.written))


def is_structural(data: bytes) -> bool:
    """Whether the bytes may open or close a JSON value."""
    return any(byte in data for byte in b'"[]{},')


def _same(value: Any) -> str:
    """A text that is equal for values that JSON Schema considers equal."""
    return json.dumps(_numbers_alike(value), sort_keys=True)


def _numbers_alike(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _numbers_alike(part) for name, part in value.items()}
    return [_numbers_alike(part) for part in value] if isinstance(value, list) else value
