"""Converts argument values that are not written as JSON to JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from .tape import Reading, Tape, copy_value

Give = Callable[[str], None]
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "f": "\f"}
_KINDS: list[tuple[type, str]] = [
    (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"),
]  # fmt: skip


def quoted(text: str) -> str:
    """A text escaped as in a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def scalar(text: str) -> str:
    """A bare word or number as JSON: unchanged if it is JSON, Python's constants by their JSON names, anything else as
    a string."""
    text = text.strip()
    return _WORDS.get(text) or (text if _is_json(text) else json.dumps(text, ensure_ascii=False))


def typed(text: str, schema: Any) -> str:
    """A value of a tagged call as JSON, by the types that the schema of its parameter allows."""
    kinds = types_of(schema)
    if kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    word = _WORDS.get(text.strip(), text.strip())
    if _is_json(word) and (not kinds or _kind(word) & kinds or "string" not in kinds):
        return word
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Any) -> set[str]:
    """The types that a schema names; empty if it allows any."""
    if not isinstance(schema, dict):
        return set()
    if isinstance(named := schema.get("type"), str | list):
        return {named} if isinstance(named, str) else {kind for kind in named if isinstance(kind, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return set().union(*(_kind_of(value) for value in values))
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list):
            found = [types_of(part) for part in parts]
            return set().union(*found) if all(found) else set()
    return set()


def _is_json(text: str) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _kind(text: str) -> set[str]:
    return _kind_of(json.loads(text))


def _kind_of(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    name = next(name for kind, name in _KINDS if isinstance(value, kind))
    return {name, "number"} if name == "integer" else {name}


def copy_loose(tape: Tape, give: Give, quote: str) -> Reading[bool]:
    """Pass on a value in a notation like {key:<q>text<q>,more:[1,true]} as JSON; whether it is complete."""
    yield from tape.blanks()
    if (yield from tape.skip(quote)):
        give('"')
        if not (yield from tape.until([quote], lambda text: give(quoted(text)))):
            return False
        tape.take(len(quote))
        give('"')
        return True
    first = yield from tape.peek()
    if first == '"':
        return (yield from copy_value(tape, give))
    if first not in ("{", "["):
        return (yield from _copy_scalar(tape, give, ",}]"))
    close = "}" if first == "{" else "]"
    give(tape.take(1))
    while True:
        yield from tape.blanks()
        found = yield from tape.peek()
        if found in (close, ""):
            give(tape.take(1))
            return bool(found)
        if found == ",":
            tape.take(1)
            give(", ")
        elif first == "{":
            if not (yield from _copy_key(tape, give, quote)) or not (yield from copy_loose(tape, give, quote)):
                return False
        elif not (yield from copy_loose(tape, give, quote)):
            return False


def _copy_key(tape: Tape, give: Give, quote: str) -> Reading[bool]:
    pieces: list[str] = []
    if not (yield from tape.until([":"], pieces.append)):
        return False
    tape.take(1)
    key = "".join(pieces).strip().removeprefix(quote).removesuffix(quote).strip("\"'")
    give(json.dumps(key, ensure_ascii=False) + ": ")
    return True


def copy_python(tape: Tape, give: Give) -> Reading[bool]:
    """Pass on a Python literal as JSON; whether it is complete."""
    yield from tape.blanks()
    first = yield from tape.peek()
    if first in ("'", '"'):
        return (yield from _copy_python_string(tape, give))
    if first not in ("{", "[", "("):
        return (yield from _copy_scalar(tape, give, ",)}]"))
    close = {"{": "}", "[": "]", "(": ")"}[first]
    tape.take(1)
    give("{" if first == "{" else "[")
    while True:
        yield from tape.blanks()
        found = yield from tape.peek()
        if found in (close, ""):
            tape.take(1)
            give("}" if first == "{" else "]")
            return bool(found)
        if found in (",", ":"):
            tape.take(1)
            give(found + " ")
        elif not (yield from copy_python(tape, give)):
            return False


def _copy_python_string(tape: Tape, give: Give) -> Reading[bool]:
    quote = tape.take(1)
    give('"')
    while True:
        found = yield from tape.until([quote, "\\"], lambda text: give(quoted(text)))
        if not found:
            return False
        tape.take(1)
        if found == quote:
            give('"')
            return True
        escaped = yield from tape.peek()
        tape.take(1)
        size = {"x": 2, "u": 4, "U": 8}.get(escaped, 0)
        code = yield from tape.peek(size) if size else tape.peek(0)
        if size and re.fullmatch(r"[0-9a-fA-F]+", code) and int(code, 16) < 0xD800:
            give(quoted(chr(int(tape.take(size), 16))))
        else:
            give(quoted(_ESCAPED.get(escaped, escaped)))


def _copy_scalar(tape: Tape, give: Give, ends: str) -> Reading[bool]:
    pieces: list[str] = []
    whole = yield from tape.until(list(ends), pieces.append)
    give(scalar("".join(pieces)))
    return bool(whole)
