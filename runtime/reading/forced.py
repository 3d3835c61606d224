"""Grammars for answers that must call a tool, in the format in which the model writes calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..errors import RequestError
from ..grammars.sources import embedded, of_lark
from .calls import Schemas
from .formats import ID, AnswerFormat, CallFormat

_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_TEXT = "/(.|\\n)*/"


def tool_grammar(
    form: AnswerFormat,
    schemas: Schemas,
    most: int | None,
    special_tokens: Mapping[str, int] | None = None,
    end_ids: Collection[int] = (),
) -> str:
    """The source of a grammar for one or more tool calls. most: the largest number of calls; None: any. schemas: of the
    parameters, by tool. special_tokens, end_ids: of the tokenizer; None: it has none. RequestError if a schema is
    nested too deep or too large."""
    assert form.calls is not None
    try:
        writer = _Writer(form, form.calls, special_tokens or {}, end_ids)
        return writer.write(schemas, 1 if not form.calls.parallel else most)
    except RequestError as error:
        raise RequestError(error.message, error.hint, field="tools") from error


def offered_grammar(
    form: AnswerFormat,
    schemas: Schemas,
    most: int | None,
    special_tokens: Mapping[str, int] | None = None,
    end_ids: Collection[int] = (),
) -> str:
    """As `tool_grammar`, for text that may end with calls: after the mark of a call a call must follow."""
    calls = form.calls
    assert calls is not None and not calls.opening
    [mark] = calls.triggers
    behind = replace(calls, before=calls.before.removeprefix(mark), separator=calls.separator + mark)
    try:
        return _Writer(form, behind, special_tokens or {}, end_ids).write(schemas, most, mark)
    except RequestError as error:
        raise RequestError(error.message, error.hint, field="tools") from error


def _as_object(calls: CallFormat, name: str, arguments: Any) -> dict[str, Any]:
    """The schema of a call that is one JSON object."""
    return {
        "type": "object",
        "properties": {calls.name_key: {"const": name}, calls.arguments_key: arguments},
        "required": [calls.name_key, calls.arguments_key],
        "additionalProperties": False,
    }


class _Writer:
    """Writes one grammar: rules in Lark, and schemas for the JSON parts."""

    def __init__(
        self, form: AnswerFormat, calls: CallFormat, special_tokens: Mapping[str, int], end_ids: Collection[int]
    ) -> None:
        self._form, self._calls = form, calls
        self._special_tokens, self._end_ids = special_tokens, end_ids
        self._rules: list[str] = []
        self._schemas: dict[str, Any] = {}

    def write(self, schemas: Schemas, most: int | None, mark: str = "") -> str:
        """The source. mark: if calls may come after text, the mark with which they begin; `before` is then the text
        between the mark and the call."""
        calls = self._calls
        opening, closing, separator = (self._text(text) for text in (calls.opening, calls.closing, calls.separator))
        more = "" if most == 1 else f"({separator} call){'*' if most is None else f'~0..{most - 1}'}"
        self._rules.append(f"start: {'WORDS? | TO_CALL' if mark else opening} call {more} {closing}")
        if mark:  # text without the mark, or up to it
            self._rules.append(f"WORDS: /(?s:.+)/ & ~/(?s:.*){mark}(?s:.*)/")
            self._rules.append(f"TO_CALL: /(?s:.*){mark}/ & ~/(?s:.*){mark}(?s:.+)/")
        self._rules.append(f"call: {' | '.join(f'call_{number}' for number in range(len(schemas)))}")
        for number, (name, schema) in enumerate(schemas.items()):
            self._rules.append(f"call_{number}: {self._call(number, name, schema or _ANY_ARGUMENTS)}")
        return of_lark("\n".join(self._rules) + "\n", self._schemas)

    def _call(self, number: int, name: str, schema: dict[str, Any]) -> str:
        calls = self._calls
        before, between, after = calls.before + name, calls.between, calls.after
        if calls.shape == "object":
            call = self._json(f"call_json_{number}", _as_object(calls, name, embedded(schema, number)))
            return f"{self._text(calls.before)} {call} {self._text(calls.after)}"
        if calls.shape in ("json", "messages"):
            arguments = self._json(f"arguments_{number}", schema)
        elif calls.shape == "tagged":
            arguments = self._tagged(number, schema)
        else:
            arguments = self._keywords(number, schema)
        return f"{self._text(before)} {self._text(between)} {arguments} {self._text(after)}"

    def _json(self, rule: str, schema: Any) -> str:
        self._schemas[rule] = schema
        return rule

    # -- arguments that are not JSON ---------------------------------------------------------------------------------

    def _tagged(self, number: int, schema: dict[str, Any]) -> str:
        """A rule for parameters between tags, in the order of the schema."""
        calls, parts = self._calls, []
        for at, (key, part, required) in enumerate(_properties(schema)):
            value = self._value(f"value_{number}_{at}", part, schema, self._text(calls.value_close))
            parts.append(f"({self._text(calls.key_open + key + calls.key_close)} {value}){'' if required else '?'}")
        return " ".join(parts)

    def _value(self, rule: str, part: Any, whole: dict[str, Any], close: str) -> str:
        """A rule for a value and the text that ends it: texts are unquoted, anything else is JSON."""
        if _is_text(part):
            if (allowed := _texts(part)) is not None:
                return f"({' | '.join(self._text(text) for text in allowed)}) {close}"
            if close.startswith('"'):  # the first such mark ends it
                self._rules.append(f"{rule}[suffix={close}]: {_TEXT}")
                return rule
            return f"{_TEXT} {close}"
        return f"{self._json(rule, _with_definitions(part, whole))} {close}"

    def _keywords(self, number: int, schema: dict[str, Any]) -> str:
        """A rule for {key:value,…} or (key=value, …), required keys first."""
        loose = self._calls.shape == "loose"
        equals, comma, brackets = (":", ",", "{}") if loose else ("=", ", ", "()")
        quote = self._text(self._calls.quote)
        found = sorted(_properties(schema), key=lambda one: not one[2])
        items = []
        for at, (key, part, _) in enumerate(found):
            rule = f"value_{number}_{at}"
            if loose and _is_text(part):
                value = f"{quote} {self._value(rule, part, schema, quote)}"
            else:
                value = self._json(rule, _with_definitions(part, schema))
            items.append(f"{self._text(key + equals)} {value}")
        required = sum(one[2] for one in found)
        separator = self._text(comma)
        listed = []
        for first in range(1 if required else len(items)):
            rest = [f"({separator} {item}){'' if at < required else '?'}" for at, item in enumerate(items)]
            listed.append(" ".join([items[first], *rest[first + 1 :]]))
        inner = f"({' | '.join(listed)}){'' if required else '?'}" if listed else ""
        return f"{self._text(brackets[0])} {inner} {self._text(brackets[1])}"

    def _text(self, text: str) -> str:
        """A text of the format as Lark: literals, special tokens by their ids, and a pattern for ids of calls. End
        tokens are left out: they may come wherever the grammar ends."""
        pieces = [self._literal(piece) for piece in text.split(ID)]
        return f" {'/[a-zA-Z0-9]{9}/' if self._form.ids == 'short' else '/:[0-9]+/'} ".join(pieces).strip()

    def _literal(self, text: str) -> str:
        parts, plain = [], ""
        while text:
            found = [(text.find(mark), mark) for mark in self._special_tokens if mark in text]
            at, mark = min(found, default=(-1, ""))
            plain, text = (text, "") if at < 0 else (text[:at], text[at + len(mark) :])
            if plain:
                parts.append(json.dumps(plain, ensure_ascii=False))
            token = self._special_tokens.get(mark)
            if token is not None and token not in self._end_ids:
                parts.append(f"<[{token}]>")
        return " ".join(parts)


def _properties(schema: dict[str, Any]) -> list[tuple[str, Any, bool]]:
    """(name, schema, whether it is required) of each property."""
    found, required = schema.get("properties"), schema.get("required")
    required = required if isinstance(required, list) else []
    return [(key, part, key in required) for key, part in found.items()] if isinstance(found, dict) else []


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and (part.get("type") == "string" or _texts(part) is not None)


def _texts(part: dict[str, Any]) -> list[str] | None:
    """The values of an enum of strings; None if the schema is no such enum."""
    values = part.get("enum", [part["const"]] if "const" in part else None)
    return values if isinstance(values, list) and values and all(isinstance(one, str) for one in values) else None


def _with_definitions(part: Any, whole: dict[str, Any]) -> Any:
    """A part of a schema as a schema of its own, with the definitions that it refers to."""
    definitions = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return {**definitions, **part} if isinstance(part, dict) and definitions else part
