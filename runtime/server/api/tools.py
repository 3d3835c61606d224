"""Tool calls in the format of the model's own chat template, which is found by probing it: no model is known by name.

A call with known words is rendered through the template. What stands before and after its JSON is the format's frame,
and the keys under which the words stand are the format's keys. Formats that are not JSON are not read.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RequestError
from ...grammars.sources import Schema, embedded, of_lark
from .model import ServedModel
from .requests import NamedTool, Tool
from .responses import CalledFunction, CalledTool
from .sandbox import Sandbox
from .sandbox_main import Render

_NAME, _KEY, _VALUE, _PLAIN = "icc_probe_name", "icc_probe_key", "icc_probe_value", "icc_probe_plain"
_USER = {"role": "user", "content": "icc_probe_user"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "icc_probe_about",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class ToolFormat:
    """`open` JSON `close`, where the JSON is an object with these keys, or a list of such objects.

    `grammar_open` and `grammar_close` are the frame in llguidance's Lark, which names special tokens by their ids.
    """

    open: str
    close: str
    name_key: str
    arguments_key: str
    is_list: bool
    grammar_open: str
    grammar_close: str


async def find_tool_format(model: ServedModel, sandbox: Sandbox) -> ToolFormat | None:
    """The tool format of the model's template; None if it has none, or one that is not JSON."""
    call = {"id": "callprobe", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        prompt = await sandbox.render(Render([_USER], [_TOOL]))
        called = await sandbox.render(Render([_USER, said], [_TOOL], add_generation_prompt=False))
        plain = await sandbox.render(
            Render([_USER, {"role": "assistant", "content": _PLAIN}], [_TOOL], add_generation_prompt=False)
        )
    except RequestError:
        return None
    shared = _common_prefix(prompt, called)
    answer = called[shared:]
    found = _find_call(answer)
    if found is None or _NAME not in prompt:  # a template that does not show the tools cannot use them
        return None
    start, end, is_list, name_key, arguments_key = found
    end_of_turn = plain.partition(_PLAIN)[2]
    close = answer[end:].removesuffix(end_of_turn)
    opening, closing = answer[:start].strip(), close.strip()
    return ToolFormat(
        opening, closing, name_key, arguments_key, is_list, _as_lark(model, answer[:start]), _as_lark(model, close)
    )


def called_tools(choice: str | NamedTool | None, tools: Sequence[Tool]) -> list[Tool]:
    """The tools of which one must be called; none where the model is free to answer in words."""
    if choice == "required":
        return list(tools)
    if isinstance(choice, NamedTool):
        return [tool for tool in tools if tool.function.name == choice.function.name]
    return []


def tool_grammar(form: ToolFormat, tools: Sequence[Tool]) -> str:
    """A grammar for one call of one of the tools, in the model's format."""
    calls = [
        {
            "type": "object",
            "properties": {
                form.name_key: {"const": tool.function.name},
                form.arguments_key: embedded(tool.function.parameters or _ANY_ARGUMENTS, number),
            },
            "required": [form.name_key, form.arguments_key],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    schema: Schema = {"anyOf": calls} if len(calls) > 1 else calls[0]
    if form.is_list:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    return of_lark(f"start: {form.grammar_open} call {form.grammar_close}\n", {"call": schema})


class ToolReader:
    """Splits an answer that comes in pieces into text to show and tool calls."""

    def __init__(self, form: ToolFormat, names: Sequence[str] = ()) -> None:
        self._form, self._names = form, set(names)
        self._held = ""
        self._shown = False
        self._in_calls = False

    def push(self, piece: str) -> str:
        """Text that is safe to show: no tool call has begun before it, nor may one begin at its end."""
        self._held += piece
        if self._in_calls:
            return ""
        start = self._start()
        if start is not None:
            self._in_calls = True
            return self._show(start)
        if not self._shown and not self._held.strip():
            return ""  # blanks before a call that has no opening mark
        return self._show(len(self._held) - _overlap(self._held, self._form.open))

    def finish(self) -> tuple[str, list[CalledTool]]:
        """The rest of the text, and the calls; what does not parse as calls is text."""
        calls = self._calls() if self._in_calls or not self._shown else []
        text, self._held = ("" if calls else self._held), ""
        return text, calls

    def _start(self) -> int | None:
        if self._form.open and self._form.open in self._held:
            return self._held.index(self._form.open)
        # the opening mark may be a special token, which text does not show, or there may be none
        bare = len(self._held) - len(self._held.lstrip())
        if not self._shown and self._held[bare : bare + 1] in ("{", "["):
            return bare
        return None

    def _show(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        self._shown = self._shown or bool(text.strip())
        return text

    def _calls(self) -> list[CalledTool]:
        rest, calls = self._held.strip(), []
        while rest:
            rest = rest.removeprefix(self._form.open).lstrip()
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                return []
            for item in value if isinstance(value, list) else [value]:
                call = self._call(item)
                if call is None:
                    return []
                calls.append(call)
            rest = rest[end:].lstrip().removeprefix(self._form.close).lstrip().removeprefix(";").lstrip()
        return calls

    def _call(self, item: object) -> CalledTool | None:
        if not isinstance(item, dict) or not isinstance(name := item.get(self._form.name_key), str):
            return None
        if self._names and name not in self._names:
            return None
        arguments = item.get(self._form.arguments_key, {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return CalledTool(f"call_{uuid.uuid4().hex[:24]}", CalledFunction(name, text))


def _find_call(answer: str) -> tuple[int, int, bool, str, str] | None:
    """Where the call's JSON stands: start, end, whether it is a list, and its keys."""
    decoder = json.JSONDecoder()
    for start, char in enumerate(answer):
        if char not in "{[":
            continue
        try:
            value, end = decoder.raw_decode(answer, start)
        except (ValueError, RecursionError):
            continue
        call = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(call, dict):
            continue
        names = [key for key, part in call.items() if part == _NAME]
        arguments = [key for key, part in call.items() if part == {_KEY: _VALUE}]
        if names and arguments:
            return start, end, isinstance(value, list), names[0], arguments[0]
    return None


def _common_prefix(first: str, second: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `mark`."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


def _as_lark(model: ServedModel, text: str) -> str:
    """A text as Lark: literals, and special tokens by their ids."""
    if not text or model.tokenizer is None:
        return json.dumps(text) if text else ""
    parts: list[str] = []
    plain: list[int] = []
    for token in [*model.tokenizer.encode(text, add_special_tokens=False), None]:
        if token is not None and model.tokenizer.decode([token]):
            plain.append(token)
            continue
        if literal := model.tokenizer.decode(plain):
            parts.append(json.dumps(literal))
        plain.clear()
        if token is not None:
            parts.append(f"<[{token}]>")
    return " ".join(parts)
