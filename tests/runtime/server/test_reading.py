"""Parts of answers (text, reasoning, tool calls) are found by the chat template alone, however the text is cut."""
# ruff: noqa: E501

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from icc.runtime.errors import RequestError
from icc.runtime.reading.formats import AnswerFormat, CallFormat, Thinking
from icc.runtime.reading.generic import GENERIC
from icc.runtime.reading.parts import CallArguments, CallBegun, Said, Thought
from icc.runtime.reading.probe import _shared, find_format
from icc.runtime.reading.reader import AnswerReader
from icc.runtime.server.api.sandbox_main import answer
from icc.runtime.templates.template import ChatTemplate
from icc.runtime.templates.template_input import TemplateInput

from .call_templates import CALL_TEMPLATES
from .chat_templates import TEMPLATES

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}},
    },
    "g": None,
}
SPECIAL = {"<|channel|>": 1, "<|message|>": 2, "<|start|>": 3, "<|end|>": 4, "<|call|>": 5, "<eos>": 6}


def form_of(name: str) -> AnswerFormat:
    template, special = (CALL_TEMPLATES | TEMPLATES)[name]
    chat = ChatTemplate(template, special)

    async def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool) -> str:
        found = answer(chat, TemplateInput(messages, tools, prompt))
        if found.error:
            raise RequestError(found.error)
        return found.text

    return asyncio.run(find_format(template, render, SPECIAL))


def read(form: AnswerFormat, text: str, size: int, **options: Any) -> tuple[str, str, list[tuple[str, str]], int]:
    """The text, the reasoning, the tool calls, and the number of pieces in which arguments came."""
    reader = AnswerReader(form, SCHEMAS, make_id=lambda name, index: f"{name}{index}", **options)
    parts = [part for at in range(0, len(text), size) for part in reader.push(text[at : at + size])]
    parts += reader.finish()
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallBegun):
            assert part.index == len(calls) and part.id == f"{part.name}{part.index}"
            calls.append([part.name, ""])
        elif isinstance(part, CallArguments):
            calls[part.index][1] += part.text
    said, thought = ("".join(p.text for p in parts if isinstance(p, kind)) for kind in (Said, Thought))
    pieces = sum(isinstance(part, CallArguments) for part in parts)
    return said, thought, [(name, arguments) for name, arguments in calls], pieces


# -- found in the template -------------------------------------------------------------------------------------------

SHAPES = {
    "qwen-2.5": "object", "qwen-3": "object", "qwen-3-thinking": "object", "qwen-3-coder": "tagged",
    "llama-3.1": "object", "mistral-v3": "object", "mistral-v11": "json", "magistral": "json", "deepseek-r1": "json",
    "deepseek-v3.1": "json", "kimi-k2": "json", "glm-4": "tagged", "gemma-4": "loose", "pythonic": "python",
    "harmony": "messages",
}  # fmt: skip
THINK = Thinking("<think>", "</think>")
THOUGHTS = {
    "qwen-3": THINK, "qwen-3-thinking": THINK, "deepseek-r1": THINK, "deepseek-v3.1": THINK, "glm-4": THINK,
    "magistral": Thinking("[THINK]", "[/THINK]"), "gemma-4": Thinking("<|channel>thought", "<channel|>"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    """One tool call, and two, written by the template itself; cut into pieces of several sizes."""
    form = form_of(name)
    assert form.calls is not None and form.calls.shape == SHAPES[name] and form.thinking == THOUGHTS.get(name)
    template, special = CALL_TEMPLATES[name]
    given = {"a": 'x "y" <b>\nz é', "n": 7, "b": True}
    for names in (["f"], ["f", "g"]) if form.calls.parallel else (["f"],):
        calls = []
        for number, tool in enumerate(names):
            ids = {"any": f"call_{number}", "short": f"abcdefgh{number}", "named": f"functions.{tool}:{number}"}
            arguments: Any = json.dumps(given) if form.arguments_as_text else given
            calls.append({"id": ids[form.ids], "type": "function", "function": {"name": tool, "arguments": arguments}})
        conversation = [{"role": "user", "content": "hi"}]
        tools = [
            {"type": "function", "function": {"name": tool, "description": "d", "parameters": SCHEMAS["f"]}}
            for tool in names
        ]
        chat = ChatTemplate(template, special)
        prompt = chat.render(conversation, tools)
        whole = chat.render([*conversation, {"role": "assistant", "content": "", "tool_calls": calls}], tools, False)
        text = whole[_shared(prompt, whole) :]
        thinking = form.thinks_after(prompt)
        text = f"hm</think>{text}" if thinking and "</think>" not in text else text
        for size in (1, 5, 1000):
            said, _, found, _ = read(form, text, size, thinking=thinking)
            assert [tool for tool, _ in found] == names
            for _, arguments in found:
                assert json.loads(arguments) == given
            assert not re.sub("<[^<>]*>", "", said).strip(), said  # except the end of the turn


def test_templates_tell_what_else_they_need() -> None:
    assert form_of("chatml") == AnswerFormat(GENERIC, hidden=frozenset(SPECIAL), generic=True)
    assert form_of("gemma") == AnswerFormat(GENERIC, hidden=frozenset(SPECIAL), generic=True, system=False)
    assert form_of("mistral-v3").ids == "short" and form_of("kimi-k2").ids == "named"
    assert form_of("deepseek-v3.1").arguments_as_text and not form_of("llama-3.1").calls.parallel  # type: ignore[union-attr]
    harmony = form_of("harmony")
    assert harmony.messages and harmony.special and harmony.developer and not form_of("qwen-3").special


# -- answers ---------------------------------------------------------------------------------------------------------

QWEN = AnswerFormat(CallFormat("object", before="<tool_call>\n", after="\n</tool_call>", separator="\n"), THINK)
LLAMA = AnswerFormat(CallFormat("object", arguments_key="parameters", parallel=False))
MISTRAL = AnswerFormat(CallFormat("object", opening="[TOOL_CALLS] [", separator=", ", closing="]"))
HARMONY = AnswerFormat(CallFormat("messages"), messages=True, special=True, hidden=frozenset(SPECIAL))
ANSWERS = [
    (QWEN, 'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "I look.", "", [("f", '{"a": 1}')]),
    (
        QWEN,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "", "", [("f", "{}"), ("g", "{}")],
    ),
    # text after a call does not change the call
    (QWEN, 'A <tool_call>{"name": "f", "arguments": {}}</tool_call> and B', "A\nand B", "", [("f", "{}")]),
    (LLAMA, '{"name": "f", "parameters": {"a": "x"}} That was it.', "That was it.", "", [("f", '{"a": "x"}')]),
    # arguments are returned as they were written
    (QWEN, '<tool_call>{"name": "f", "arguments": {"n": 1e999}}</tool_call>', "", "", [("f", '{"n": 1e999}')]),
    (QWEN, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "", "", [("f", '{"a": "\\ud800"}')]),
    (QWEN, '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>', "", "", [("f", '{"a": "\ufffd"}')]),
    (QWEN, '<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>', "", "", [("f", '{"a": "}"}')]),
    (QWEN, '<tool_call>{"name": "f"}</tool_call>', "", "", [("f", "{}")]),
    (QWEN, '<tool_call>{"type": "function", "function": {"name": "f", "arguments": null}}</tool_call>', "", "", [("f", "{}")]),
    # what only looks like a call is text
    (QWEN, "2 < 3 and <tool is no call", "2 < 3 and <tool is no call", "", []),
    (QWEN, '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', "", []),
    (QWEN, '<tool_call>{"name": "h", "arguments": {}}</tool_call>', '<tool_call>{"name": "h", "arguments": {}}</tool_call>', "", []),
    (QWEN, '<tool_call>{"name": "\\ud800", "arguments": {}}', '<tool_call>{"name": "\\ud800", "arguments": {}}', "", []),
    (LLAMA, '{"some": "json"}', '{"some": "json"}', "", []),
    (LLAMA, 'It is {"name": "f", "parameters": {}}', 'It is {"name": "f", "parameters": {}}', "", []),
    (LLAMA, " \n ", " \n ", "", []),
    # an unfinished call is returned as far as it goes
    (QWEN, '<tool_call>{"name": "f", "arguments": {"a": "x', "", "", [("f", '{"a": "x')]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "", "", [("f", "{}"), ("g", "{}")]),
    (MISTRAL, ' [{"name": "f", "arguments": {}}]', "", "", [("f", "{}")]),  # models may omit the mark
    # thoughts
    (QWEN, "<think>\n1 < 2\n</think>\n\nYes.\n", "Yes.\n", "1 < 2", []),
    (QWEN, '<think>a</think><tool_call>{"name": "f", "arguments": {}}</tool_call>', "", "a", [("f", "{}")]),
    (QWEN, "Say <think> to think", "Say <think> to think", "", []),
    (
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}<|call|>',
        "I look.", "hm", [("f", '{"a": "x"}')],
    ),
    (HARMONY, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes", "Yes", "hm", []),
    (HARMONY, " to=functions.f<|channel|>commentary json<|message|>{}", "", "", [("f", "{}")]),
    (HARMONY, "no channels<eos>", "no channels", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "said", "thought", "calls"), ANSWERS)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_answers_are_told_apart(form: AnswerFormat, text: str, said: str, thought: str, calls: Any, size: int) -> None:
    assert read(form, text, size)[:3] == (said, thought, calls)


def test_arguments_come_as_they_are_written() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "one two three"}}</tool_call>'
    assert read(QWEN, text, 4)[3] > 5
    coder = form_of("qwen-3-coder")
    text = "<tool_call>\n<function=f>\n<parameter=a>\none two three\n</parameter>\n</function>\n</tool_call>"
    assert read(coder, text, 4)[2:] == ([("f", '{"a": "one two three"}')], 9)


def test_more_calls_than_are_wanted_are_left_out() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>!'
    assert read(QWEN, text, 3, most=1)[:3] == ("", "", [("f", "{}")])


def test_tagged_values_have_the_types_of_their_schema() -> None:
    coder = form_of("qwen-3-coder")
    values = {"a": ("5", '"5"'), "n": ("5", "5"), "b": ("True", "true"), "other": ('{"x": [1]}', '{"x": [1]}')}
    for key, (written, expected) in values.items():
        text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
        assert read(coder, text, 7)[2] == [("f", f'{{"{key}": {expected}}}')]


def test_a_prompt_may_end_in_a_thought() -> None:
    form = replace(QWEN)
    assert form.thinks_after("…assistant\n<think>\n") and not form.thinks_after("what does <think> mean\nassistant\n")
    assert not form.thinks_after("…<think>\n\n</think>\n\n")
    assert form.thinks_after("…<think>\nso", continued="<think>\nso")
    assert read(form, "hm</think>Yes", 2, thinking=True)[:2] == ("Yes", "hm")
    assert form.without_thought("a\n<think>\n") == "a\n<think>\n\n</think>\n\n"
    assert HARMONY.without_thought("<|start|>assistant").endswith("<|channel|>final<|message|>")


def test_a_call_that_was_cut_off_is_not_the_last_that_is_wanted() -> None:
    for text, full in (('{"name": "f", "arguments": {"a": "x', False), ('{"name": "f", "arguments": {"a": 1}}', True)):
        reader = AnswerReader(QWEN, SCHEMAS, 1)
        reader.push("<tool_call>" + text)
        reader.finish()
        assert reader.calls == 1 and reader.full == full
