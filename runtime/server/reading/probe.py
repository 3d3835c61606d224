"""Finds how a model writes calls and thoughts, from its chat template: no model is known by name.

Calls with known words are rendered through the template. What stands around and between those words is the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from ...errors import RequestError
from .formats import ID, AnswerFormat, CallFormat, Thinking, atoms, marks

Rendering = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], Awaitable[str]]

_NAME, _OTHER = "icc_probe_name", "icc_probe_other"
_KEY, _MORE, _VALUE, _NUMBER = "icc_probe_key", "icc_probe_more", "icc_probe_value", 7
_PLAIN, _THOUGHT = "icc_probe_plain", "icc_probe_thought"
_LONG_IDS = ("call_0123456789abcdef01234567", "call_76543210fedcba9876543210")
_SHORT_IDS = ("callprobe", "callother")
_USER = {"role": "user", "content": "icc_probe_user"}
_CLOSING = re.compile(r"[<\[]/[\w:|]*(?:think|reason|thought)[\w:|]*[>\]]", re.IGNORECASE)
_EMPTY_THOUGHT = re.compile(rf"\A\s*(?:[<\[][\w:|]+[>\]])?\s*{_CLOSING.pattern}\s*", re.IGNORECASE)
_CHANNEL = re.compile(r"<\|(\w+)>thought")
_IN_CHANNELS = ("<|channel|>", "<|message|>")


def _tool(name: str) -> dict[str, Any]:
    properties = {
        _KEY: {"type": "string", "description": "icc_probe_about"},
        _MORE: {"type": "integer", "description": "icc_probe_about"},
    }
    parameters = {"type": "object", "properties": properties, "required": [_KEY]}
    function = {"name": name, "description": "icc_probe_about", "parameters": parameters}
    return {"type": "function", "function": function}


_TOOLS = [_tool(_NAME), _tool(_OTHER)]


async def find_format(source: str, render: Rendering, special_tokens: Mapping[str, int]) -> AnswerFormat:
    """The format of a template's answers. render: renders messages and tools, with the generation prompt or without it;
    RequestError if the template refuses them. special_tokens: of the tokenizer, which no answer shows."""
    probe = _Probe(render)
    await probe.look_at_calls()
    thinking = await probe.thinking() or _thinking_in(source)
    messages = all(mark in source for mark in _IN_CHANNELS)
    calls = probe.calls
    if messages:
        thinking = None
        calls = None if calls is None else replace(calls, shape="messages")
    texts = [calls.opening, calls.before, calls.between, calls.after, calls.quote] if calls else []
    texts += [thinking.open, thinking.close] if thinking else []
    return AnswerFormat(
        calls,
        thinking,
        messages,
        probe.ids,
        probe.arguments_as_text,
        "developer" in source,
        messages or any(mark in special_tokens for text in texts for mark in marks(text)),
        frozenset(special_tokens),
    )


class _Probe:
    """What a template makes of conversations with known words."""

    def __init__(self, render: Rendering) -> None:
        self._render = render
        self.calls: CallFormat | None = None
        self.ids: Literal["any", "short", "named"] = "any"
        self.arguments_as_text = False
        self._prompt = self._begun = self._end_of_turn = ""

    async def look_at_calls(self) -> None:
        """Find how calls are written; nothing if the template knows none."""
        self._prompt = await self._try([_USER], True) or ""
        if _NAME not in self._prompt:  # a template that does not show the tools cannot use them
            return
        plain = await self._try([_USER, {"role": "assistant", "content": _PLAIN}])
        self._begun, _, self._end_of_turn = (plain or "").partition(_PLAIN)
        one = await self._one_call()
        if one is None:
            return
        two = await self._answer((_NAME, {_KEY: _VALUE}), (_OTHER, {_KEY: _VALUE}))
        more = await self._answer((_NAME, {_KEY: _VALUE, _MORE: _NUMBER}))
        self.calls = _call_format(one, two if two and _OTHER in two else None, more or "", self._id)

    async def _one_call(self) -> str | None:
        """The answer that calls once, by the first way of writing ids and arguments that the template takes."""
        for self.arguments_as_text in (False, True):
            for self.ids in ("any", "short"):
                answer = await self._answer((_NAME, {_KEY: _VALUE}))
                if answer is not None and _NAME not in answer and self._id(_NAME, 0) in answer:
                    self.ids = "named"
                    answer = await self._answer((_NAME, {_KEY: _VALUE}))
                if answer is not None and all(word in answer for word in (_NAME, _KEY, _VALUE)):
                    return answer
        self.ids, self.arguments_as_text = "any", False
        return None

    def _id(self, name: str, number: int) -> str:
        if self.ids == "named":
            return f"functions.{name}:{number}"
        return (_SHORT_IDS if self.ids == "short" else _LONG_IDS)[number]

    async def _answer(self, *calls: tuple[str, dict[str, Any]]) -> str | None:
        """What the template writes of an answer of calls, without the end of its turn; None if it refuses."""
        made = []
        for number, (name, arguments) in enumerate(calls):
            given = json.dumps(arguments) if self.arguments_as_text else arguments
            made.append(
                {"id": self._id(name, number), "type": "function", "function": {"name": name, "arguments": given}}
            )
        rendered = await self._try([_USER, {"role": "assistant", "content": "", "tool_calls": made}])
        if rendered is None:
            return None
        answer = rendered[max(_shared(self._prompt, rendered), _shared(self._begun, rendered)) :]
        return _EMPTY_THOUGHT.sub("", answer, count=1).removesuffix(self._end_of_turn)

    async def thinking(self) -> Thinking | None:
        """The marks around a thought, if the template shows thoughts."""
        for field in ("reasoning_content", "reasoning", "thinking"):
            call = {"id": self._id(_NAME, 0), "type": "function", "function": {"name": _NAME, "arguments": {}}}
            for more in ({"content": _PLAIN}, {"content": "", "tool_calls": [call]}):
                rendered = await self._try([_USER, {"role": "assistant", field: _THOUGHT, **more}])
                if rendered is None or _THOUGHT not in rendered:
                    continue
                before, _, after = rendered.partition(_THOUGHT)
                prompt = await self._try([_USER], True) or ""
                # what the generation prompt ends with may begin the thought already
                opening = before[_shared(prompt, before) :].strip() or before.rstrip().rpartition("\n")[2]
                found = marks(opening)
                at = next((i for i in reversed(range(len(found))) if len(found[i]) > 1 and found[i][0] in "<["), None)
                closing = marks(after)
                if at is not None and closing and closing[0][0] in "<[":
                    return Thinking("".join(found[at:]), closing[0])
        return None

    async def _try(self, messages: list[dict[str, Any]], prompt: bool = False) -> str | None:
        for tools in (_TOOLS, None):
            try:
                return await self._render(messages, tools, prompt)
            except RequestError:
                continue
        return None


def _thinking_in(source: str) -> Thinking | None:
    """The marks around a thought in a template that only cuts thoughts out of what was said."""
    if closing := _CLOSING.search(source):
        return Thinking(closing[0].replace("/", "", 1), closing[0])
    if (channel := _CHANNEL.search(source)) and f"<{channel[1]}|>" in source:
        return Thinking(channel[0], f"<{channel[1]}|>")
    return None


def _shared(first: str, second: str) -> int:
    """Length of the common beginning of two texts, in whole atoms."""
    if second.startswith(first):
        return len(first)
    size = 0
    for one, other in zip(atoms(first), atoms(second), strict=False):
        if one != other:
            break
        size += len(one)
    return size


# -- one call, two calls, a call with more arguments -----------------------------------------------------------------


def _call_format(one: str, two: str | None, more: str, make_id: Callable[[str, int], str]) -> CallFormat | None:
    """The format of calls, from answers with one call, two calls (None if the template takes but one at a time), and
    one call with two arguments; None if it is none of the shapes."""
    form = _shape(one, more)
    if form is None:
        return None
    start, end = _span(one, _NAME, form)
    before, after, opening, separator, closing = one[:start], one[end:], "", "", ""
    if two is not None:
        _, first_end = _span(two, _NAME, form)
        second_start, _ = _span(two, _OTHER, form)
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
    found = make_id(_NAME, 0)
    index = found.partition(_NAME)[2]  # of an id that names the tool: what comes after the name
    return text.replace(index or found, ID, 1) if (index or found) in text else text


def _shape(one: str, more: str) -> CallFormat | None:
    if found := _find_object(one):
        return CallFormat("object", name_key=found[2], arguments_key=found[3])
    name_end = one.index(_NAME) + len(_NAME)
    rest = one[name_end:]
    if rest.find(_KEY) < 0 or rest.find(_VALUE) < rest.find(_KEY):
        return None
    if arguments := _find_value(rest, {_KEY: _VALUE}):
        return CallFormat("json", between=rest[: arguments[0]])
    to_key = rest[: rest.index(_KEY)]
    to_value = rest[len(to_key) + len(_KEY) : rest.index(_VALUE)]
    if to_key.endswith("(") and to_value.startswith("="):
        return CallFormat("python", between=to_key)
    if to_key.rstrip().endswith("{") and to_value.startswith(":"):
        return CallFormat("loose", between=to_key.rstrip()[:-1], quote=to_value[1:].strip())
    return _tagged(to_key, to_value, more)


def _tagged(to_key: str, to_value: str, more: str) -> CallFormat | None:
    gap = re.search(f"{_VALUE}(.*?){_MORE}{re.escape(to_value)}{_NUMBER}", more, re.DOTALL)
    if gap is None or not marks(to_value):
        return None
    between, key_open = _split_end(to_key, gap[1])
    value_close = gap[1][: len(gap[1]) - len(key_open)]
    if not marks(key_open) or not marks(value_close):
        return None
    return CallFormat("tagged", between=between, key_open=key_open, key_close=to_value, value_close=value_close)


def _span(text: str, name: str, form: CallFormat) -> tuple[int, int]:
    """Where a call stands: its object, or from its name to the end of its arguments."""
    if form.shape == "object":
        found = _find_object(text, name)
        assert found is not None
        return found[0], found[1]
    start = text.index(name)
    end = text.index(_VALUE, start) + len(_VALUE)
    if form.shape == "json":
        found = _find_value(text[start:], {_KEY: _VALUE})
        assert found is not None
        return start, start + found[1]
    if form.shape == "loose":
        end = text.index("}", end) + 1
    if form.shape == "python":
        end = text.index(")", end) + 1
    return start, end


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Where JSON objects stand in a text, nested ones too: start, end, and what they are."""
    decoder = json.JSONDecoder()
    for start in (at.start() for at in re.finditer(r"\{", text)):
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        yield start, end, value


def _find_object(text: str, name: str = _NAME) -> tuple[int, int, str, str] | None:
    """Where the JSON object of a call stands: start, end, and its keys."""
    for start, end, value in _objects(text):
        function = value.get("function")
        inner = function if isinstance(function, dict) else value
        names = [key for key, part in inner.items() if part == name]
        arguments = [key for key, part in inner.items() if part in ({_KEY: _VALUE}, json.dumps({_KEY: _VALUE}))]
        if names and arguments:
            return start, end, names[0], arguments[0]
    return None


def _find_value(text: str, wanted: object) -> tuple[int, int] | None:
    """Where a JSON object stands in a text."""
    return next(((start, end) for start, end, value in _objects(text) if value == wanted), None)


def _split_end(text: str, other: str) -> tuple[str, str]:
    """The text in two: the second part is the longest that `other` ends with too, in whole atoms."""
    size = 0
    for one, two in zip(reversed(atoms(text)), reversed(atoms(other)), strict=False):
        if one != two:
            break
        size += len(one)
    return text[: len(text) - size], text[len(text) - size :]


def _split_start(text: str, other: str) -> tuple[str, str]:
    """The text in two: the first part is the longest that `other` begins with too, in whole atoms."""
    size = 0
    for one, two in zip(atoms(text), atoms(other), strict=False):
        if one != two:
            break
        size += len(one)
    return text[:size], text[size:]
