"""Readers of tool calls, one per shape of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .formats import CallFormat, marks
from .parts import Parts
from .tape import Reading, Tape, copy_value, read_string
from .values import copy_loose, copy_python, quoted, typed, types_of

Schemas = Mapping[str, Any]  # JSON schemas of the parameters, by the names of the tools
_NAME = re.compile(r"[\w.-]*")
_SKIPPED = 200  # the most characters between a name and its arguments


def read_calls(tape: Tape, parts: Parts, form: CallFormat, schemas: Schemas) -> Reading[None]:
    """Read text and calls up to the end. Text that only looks like a call is text."""
    openers = {"object": ("{", "["), "python": ("[",)}.get(form.shape, ())
    bare = True  # at the start, or right after a call, a call may begin without a mark
    while not parts.full:
        tape.keep()
        if bare:
            yield from tape.blanks()
            begins = (yield from tape.peek()) in openers or (form.shape == "python" and parts.calls)
            if begins and (yield from _read_call(tape, parts, form, schemas)):
                continue
            tape.put_back()
        bare = False
        tape.forget()
        mark = yield from tape.until(form.triggers, parts.say)
        if not mark:
            return
        tape.keep()
        if (yield from _read_call(tape, parts, form, schemas)):
            bare = True
        else:
            tape.put_back()
            parts.say(tape.take(len(mark)))
    while (yield from tape.peek()):  # more calls than are wanted
        tape.take(len(tape.text))


def _read_call(tape: Tape, parts: Parts, form: CallFormat, schemas: Schemas) -> Reading[bool]:
    """Read a call with its marks; False if it is no call: all of it can then be put back."""
    is_list = False
    for mark in form.lead:
        yield from tape.blanks()
        if (yield from tape.skip(mark)):
            is_list = mark == "["
    yield from tape.blanks()
    if form.shape in ("object", "python") and (yield from tape.skip("[")):
        is_list = True
    if form.shape == "object":
        found = yield from _read_object(tape, parts, form)
    else:
        found = yield from _read_named(tape, parts, form, schemas)
    if not found:
        return False
    parts.end_call(whole=not tape.ended)
    tails = {*form.tails, ";", *([",", "]"] if is_list or "[" in form.opening else ())}
    while True:
        tape.keep()
        yield from tape.blanks()
        for tail in tails:
            if (yield from tape.skip(tail)):
                break
        else:
            tape.put_back()
            return True
        tape.forget()


# -- a JSON object with name and arguments ---------------------------------------------------------------------------


@dataclass
class _Object:
    """The facts about a call while its object is read. early: arguments that came before the name."""

    name: str | None = None
    early: str = ""
    begun: bool = False


def _read_object(tape: Tape, parts: Parts, form: CallFormat) -> Reading[bool]:
    call = _Object()
    if not (yield from tape.skip("{")):
        return False
    while True:
        yield from tape.blanks()
        if (yield from tape.skip(",")):
            continue
        if (yield from tape.peek()) != '"':
            break
        if not (yield from _read_member(tape, parts, form, call)):
            return call.begun
    whole = yield from tape.skip("}")
    if not call.begun and (call.name is None or not whole):
        return False
    if not call.begun and call.name is not None:
        tape.forget()
        parts.begin(call.name)
        parts.argue(call.early or "{}")
    return True


def _read_member(tape: Tape, parts: Parts, form: CallFormat, call: _Object) -> Reading[bool]:
    """Read a key and its value; False if they cannot belong to a call."""
    key = yield from read_string(tape)
    yield from tape.blanks()
    if key is None or not (yield from tape.skip(":")):
        return False
    yield from tape.blanks()
    if key == form.name_key and call.name is None:
        call.name = (yield from read_string(tape)) if (yield from tape.peek()) == '"' else None
        return call.name in parts.names
    if key in (form.arguments_key, "arguments", "parameters") and not call.begun:
        if call.name is None:
            pieces: list[str] = []
            yield from _give_arguments(tape, pieces.append)
            call.early = "".join(pieces)
        else:
            call.begun = True
            tape.forget()
            parts.begin(call.name)
            yield from _give_arguments(tape, parts.argue)
        return True
    if key == "function" and call.name is None and (yield from tape.starts("{")):
        call.begun = yield from _read_object(tape, parts, form)
        return call.begun
    return (yield from copy_value(tape, lambda text: None))


def _give_arguments(tape: Tape, give: Callable[[str], None]) -> Reading[None]:
    """Pass on arguments unchanged, but those in a string without its quotes, and an empty object for null."""
    first = yield from tape.peek()
    if first == '"':
        text = yield from read_string(tape)
        give((text or "").strip() or "{}")
    elif first == "n":
        pieces: list[str] = []
        yield from copy_value(tape, pieces.append)
        text = "".join(pieces)
        give("{}" if text == "null" else text)
    else:
        yield from copy_value(tape, give)


# -- a name, then arguments ------------------------------------------------------------------------------------------


def _read_named(tape: Tape, parts: Parts, form: CallFormat, schemas: Schemas) -> Reading[bool]:
    while (found := _NAME.match(tape.text)) and found.end() == len(tape.text) and (yield from tape.more()):
        pass
    name = tape.take(found.end() if found else 0)
    if name not in parts.names:
        return False
    if form.shape == "tagged":
        tape.forget()
        parts.begin(name)
        yield from _read_tagged(tape, parts, form, schemas.get(name))
        return True
    if form.shape == "python":
        if not (yield from tape.skip("(")):
            return False
        tape.forget()
        parts.begin(name)
        yield from _read_keywords(tape, parts)
        return True
    if not (yield from _skip_to_arguments(tape, form)):
        return False
    tape.forget()
    parts.begin(name)
    if not (yield from tape.starts("{")):
        parts.argue("{}")
    elif form.shape == "loose":
        yield from copy_loose(tape, parts.argue, form.quote)
    else:
        yield from copy_value(tape, parts.argue)
    return True


def _skip_to_arguments(tape: Tape, form: CallFormat) -> Reading[bool]:
    """Skip the text between a name and its arguments, or up to the end of a call without arguments."""
    ends = [mark for text in (form.after, form.closing) for mark in marks(text)[:1] if len(mark) > 1]
    skipped = 0
    while skipped < _SKIPPED and (yield from tape.peek()):
        if (yield from tape.starts("{")):
            return True
        for end in ends:
            if (yield from tape.starts(end)):
                return True
        tape.take(1)
        skipped += 1
    return False


def _read_tagged(tape: Tape, parts: Parts, form: CallFormat, schema: Any) -> Reading[None]:
    """Read parameters between tags: values are converted to JSON by their types; texts are passed on as they arrive."""
    key_open, key_close = form.key_open.strip(), form.key_close.strip()
    value_close = marks(form.value_close)[0]
    end = next((mark for mark in marks(form.after + form.closing) if len(mark) > 1), value_close)
    known = schema.get("properties") if isinstance(schema, dict) else None
    parts.argue("{")
    first = True
    while (yield from tape.until([key_open, end], lambda text: None)) == key_open:
        tape.take(len(key_open))
        pieces: list[str] = []
        yield from tape.until([key_close], pieces.append)
        tape.take(len(key_close))
        key = "".join(pieces).strip()
        parts.argue(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        first = False
        if form.key_close.endswith("\n"):
            yield from tape.skip("\n")
        yield from _read_value(tape, parts, form, value_close, known.get(key) if isinstance(known, dict) else None)
        tape.take(len(value_close))
    parts.argue("}")


def _read_value(tape: Tape, parts: Parts, form: CallFormat, close: str, schema: Any) -> Reading[None]:
    line_end = "\n" if form.value_close.startswith("\n") else ""
    if types_of(schema) == {"string"}:
        parts.argue('"')
        yield from tape.until([line_end + close, close], lambda text: parts.argue(quoted(text)))
        parts.argue('"')
        yield from tape.skip(line_end)
        return
    pieces: list[str] = []
    yield from tape.until([close], pieces.append)
    parts.argue(typed("".join(pieces).removesuffix(line_end), schema))


def _read_keywords(tape: Tape, parts: Parts) -> Reading[None]:
    """Read Python keyword arguments up to the closing bracket."""
    parts.argue("{")
    while True:
        pieces: list[str] = []
        found = yield from tape.until([",", ")", "="], pieces.append)
        tape.take(len(found))
        if found == "=":
            parts.argue(json.dumps("".join(pieces).strip()) + ": ")
            if not (yield from copy_python(tape, parts.argue)):
                return
        elif found == ",":
            parts.argue(", ")
        else:
            parts.argue("}" if found else "")
            return
