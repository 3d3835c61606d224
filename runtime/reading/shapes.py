"""Derives the format of calls from texts with known calls.

The texts have one call, two calls, and one call with two arguments: the format is the text around and between the known
words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .formats import ID, CallFormat, atoms, marks

# words of the known calls
NAME, OTHER = "icc_probe_name", "icc_probe_other"
KEY, MORE, VALUE, NUMBER = "icc_probe_key", "icc_probe_more", "icc_probe_value", 7


def call_format(one: str, two: str | None, more: str, make_id: Callable[[str, int], str]) -> CallFormat | None:
    """The format of calls, derived from answers with one call, two calls (None if the template accepts only one), and
    one call with two arguments. None if it has none of the known shapes."""
    form = _shape(one, more)
    if form is None:
        return None
    start, end = _span(one, NAME, form)
    before, after, opening, separator, closing = one[:start], one[end:], "", "", ""
    if two is not None:
        _, first_end = _span(two, NAME, form)
        second_start, _ = _span(two, OTHER, form)
        gap = two[first_end:second_start]
        opening, before = _split_end(before, gap)
        gap = gap[: len(gap) - len(before)]
        after, closing = _split_start(after, gap)
        separator = gap[len(after) :]
    form = replace(
        form,
        opening=opening,
        before=before,
        after=_without_id(after, make_id),
        between=_without_id(form.between, make_id),
        separator=separator,
        closing=_without_id(closing, make_id),
        parallel=two is not None,
    )
    if form.shape == "tagged":
        after = after.removeprefix(form.value_close) if after.startswith(form.value_close) else after
        form = replace(form, after=after)
    return form


def _without_id(text: str, make_id: Callable[[str, int], str]) -> str:
    found = make_id(NAME, 0)
    index = found.partition(NAME)[2]  # if the id names the tool: the text after the name
    return text.replace(index or found, ID, 1) if (index or found) in text else text


def _shape(one: str, more: str) -> CallFormat | None:
    if found := _find_object(one):
        return CallFormat("object", name_key=found[2], arguments_key=found[3])
    name_end = one.index(NAME) + len(NAME)
    rest = one[name_end:]
    if rest.find(KEY) < 0 or rest.find(VALUE) < rest.find(KEY):
        return None
    if arguments := _find_value(rest, {KEY: VALUE}):
        return CallFormat("json", between=rest[: arguments[0]])
    to_key = rest[: rest.index(KEY)]
    to_value = rest[len(to_key) + len(KEY) : rest.index(VALUE)]
    if to_key.endswith("(") and to_value.startswith("="):
        return CallFormat("python", between=to_key)
    if to_key.rstrip().endswith("{") and to_value.startswith(":"):
        return CallFormat("loose", between=to_key.rstrip()[:-1], quote=to_value[1:].strip())
    return _tagged(to_key, to_value, more)


def _tagged(to_key: str, to_value: str, more: str) -> CallFormat | None:
    gap = re.search(f"{VALUE}(.*?){MORE}{re.escape(to_value)}{NUMBER}", more, re.DOTALL)
    if gap is None or not marks(to_value):
        return None
    between, key_open = _split_end(to_key, gap[1])
    value_close = gap[1][: len(gap[1]) - len(key_open)]
    if not marks(key_open) or not marks(value_close):
        return None
    return CallFormat("tagged", between=between, key_open=key_open, key_close=to_value, value_close=value_close)


def _span(text: str, name: str, form: CallFormat) -> tuple[int, int]:
    """(start, end) of a call in a text: of its object, or from its name to the end of its arguments."""
    if form.shape == "object":
        found = _find_object(text, name)
        assert found is not None
        return found[0], found[1]
    start = text.index(name)
    end = text.index(VALUE, start) + len(VALUE)
    if form.shape == "json":
        found = _find_value(text[start:], {KEY: VALUE})
        assert found is not None
        return start, start + found[1]
    if form.shape == "loose":
        end = text.index("}", end) + 1
    if form.shape == "python":
        end = text.index(")", end) + 1
    return start, end


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(start, end, value) of all JSON objects in a text, nested ones too."""
    decoder = json.JSONDecoder()
    for start in (at.start() for at in re.finditer(r"\{", text)):
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        yield start, end, value


def _find_object(text: str, name: str = NAME) -> tuple[int, int, str, str] | None:
    """(start, end, name key, arguments key) of the JSON object of a call; None if there is none."""
    for start, end, value in _objects(text):
        function = value.get("function")
        inner = function if isinstance(function, dict) else value
        names = [key for key, part in inner.items() if part == name]
        arguments = [key for key, part in inner.items() if part in ({KEY: VALUE}, json.dumps({KEY: VALUE}))]
        if names and arguments:
            return start, end, names[0], arguments[0]
    return None


def _find_value(text: str, wanted: object) -> tuple[int, int] | None:
    """(start, end) of a JSON object in a text; None if it is not there."""
    return next(((start, end) for start, end, value in _objects(text) if value == wanted), None)


def _split_end(text: str, other: str) -> tuple[str, str]:
    """Split the text: the second part is the longest common ending with `other`, in whole atoms."""
    size = 0
    for one, two in zip(reversed(atoms(text)), reversed(atoms(other)), strict=False):
        if one != two:
            break
        size += len(one)
    return text[: len(text) - size], text[len(text) - size :]


def _split_start(text: str, other: str) -> tuple[str, str]:
    """Split the text: the first part is the longest common beginning with `other`, in whole atoms."""
    size = 0
    for one, two in zip(atoms(text), atoms(other), strict=False):
        if one != two:
            break
        size += len(one)
    return text[:size], text[size:]
