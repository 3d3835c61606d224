"""Finds from a chat template how its model writes calls and thoughts, without any list of models.

Calls with known words are rendered by the template. The text around and between those words is the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from ..errors import RequestError
from .formats import AnswerFormat, CallFormat, Thinking, atoms, marks
from .generic import GENERIC
from .shapes import KEY, MORE, NAME, NUMBER, OTHER, VALUE, call_format

T = TypeVar("T")
Rendering = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], Awaitable[str]]

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
        KEY: {"type": "string", "description": "icc_probe_about"},
        MORE: {"type": "integer", "description": "icc_probe_about"},
    }
    parameters = {"type": "object", "properties": properties, "required": [KEY]}
    function = {"name": name, "description": "icc_probe_about", "parameters": parameters}
    return {"type": "function", "function": function}


_TOOLS = [_tool(NAME), _tool(OTHER)]


async def find_format(source: str, render: Rendering, special_tokens: Mapping[str, int]) -> AnswerFormat:
    """Find the format of a template's answers. render: renders messages and tools, with or without the generation
    prompt; raises RequestError if the template refuses them. special_tokens: of the tokenizer, which answers do not
    show."""
    probe = _Probe(render)
    await probe.look_at_calls()
    thinking = await probe.thinking() or _thinking_in(source)
    messages = all(mark in source for mark in _IN_CHANNELS)
    calls = probe.calls
    if messages:
        thinking = None
        calls = None if calls is None else replace(calls, shape="messages")
    generic = calls is None and not messages
    calls = GENERIC if generic else calls
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
        generic,
        await probe.shows_system(),
    )


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, such as `find_format` if its `render` does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


class _Probe:
    """Renders conversations with known words by a template."""

    def __init__(self, render: Rendering) -> None:
        self._render = render
        self.calls: CallFormat | None = None
        self.ids: Literal["any", "short", "named"] = "any"
        self.arguments_as_text = False
        self._prompt = self._begun = self._end_of_turn = ""

    async def look_at_calls(self) -> None:
        """Find how calls are written; does nothing if the template does not support them."""
        self._prompt = await self._try([_USER], True) or ""
        if NAME not in self._prompt:  # a template that does not show the tools does not support them
            return
        plain = await self._try([_USER, {"role": "assistant", "content": _PLAIN}])
        self._begun, _, self._end_of_turn = (plain or "").partition(_PLAIN)
        one = await self._one_call()
        if one is None:
            return
        two = await self._answer((NAME, {KEY: VALUE}), (OTHER, {KEY: VALUE}))
        more = await self._answer((NAME, {KEY: VALUE, MORE: NUMBER}))
        self.calls = call_format(one, two if two and OTHER in two else None, more or "", self._id)

    async def shows_system(self) -> bool:
        """Whether the text of a system message appears in the prompt."""
        rendered = await self._try([{"role": "system", "content": _PLAIN}, _USER], True)
        return rendered is not None and _PLAIN in rendered

    async def _one_call(self) -> str | None:
        """The rendered answer with one call, with the first form of ids and arguments that the template accepts; None
        if it accepts none."""
        for self.arguments_as_text in (False, True):
            for self.ids in ("any", "short"):
                answer = await self._answer((NAME, {KEY: VALUE}))
                if answer is not None and NAME not in answer and self._id(NAME, 0) in answer:
                    self.ids = "named"
                    answer = await self._answer((NAME, {KEY: VALUE}))
                if answer is not None and all(word in answer for word in (NAME, KEY, VALUE)):
                    return answer
        self.ids, self.arguments_as_text = "any", False
        return None

    def _id(self, name: str, number: int) -> str:
        if self.ids == "named":
            return f"functions.{name}:{number}"
        return (_SHORT_IDS if self.ids == "short" else _LONG_IDS)[number]

    async def _answer(self, *calls: tuple[str, dict[str, Any]]) -> str | None:
        """The rendered answer with these calls, without the end of its turn; None if the template refuses it."""
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
        """The marks around a thought; None if the template has no thoughts."""
        for field in ("reasoning_content", "reasoning", "thinking"):
            call = {"id": self._id(NAME, 0), "type": "function", "function": {"name": NAME, "arguments": {}}}
            for more in ({"content": _PLAIN}, {"content": "", "tool_calls": [call]}):
                rendered = await self._try([_USER, {"role": "assistant", field: _THOUGHT, **more}])
                if rendered is None or _THOUGHT not in rendered:
                    continue
                before, _, after = rendered.partition(_THOUGHT)
                prompt = await self._try([_USER], True) or ""
                # the generation prompt may already begin the thought
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
    """The marks around a thought in a template that only removes thoughts from earlier answers; None if there are
    none."""
    if closing := _CLOSING.search(source):
        return Thinking(closing[0].replace("/", "", 1), closing[0])
    if (channel := _CHANNEL.search(source)) and f"<{channel[1]}|>" in source:
        return Thinking(channel[0], f"<{channel[1]}|>")
    return None


def _shared(first: str, second: str) -> int:
    """The length in characters of the common beginning of two texts, in whole atoms."""
    if second.startswith(first):
        return len(first)
    size = 0
    for one, other in zip(atoms(first), atoms(second), strict=False):
        if one != other:
            break
        size += len(one)
    return size
