"""Chat templates: equal to transformers, and safe (RELIABILITY S4)."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from typing import Any

import pytest
from icc.runtime.errors import BusyError, MissingExtraError, RequestError
from icc.runtime.grammars.sources import of_schema
from icc.runtime.server.api.errors import as_http
from icc.runtime.server.api.sandbox import Sandbox
from icc.runtime.templates.source import TemplateSource
from icc.runtime.templates.template import ChatTemplate, TemplateRefused
from icc.runtime.templates.template_input import TemplateInput

from .chat_templates import TEMPLATES

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <in> a “city” & its 'suburbs'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "días": {"type": "integer"}}},
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Oslo", "días": 3}},
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": '  Hello, <world> & "all"! é 😀\n'}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n\n"}],
    "turns": [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>hm</think>\n\nTwo. "},
        {"role": "user", "content": "Three?"},
    ],
    "tool": [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"rain": true}', "tool_call_id": "abcdefghi", "name": "weather"},
    ],
    "two users": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "unknown": [{"role": "critic", "content": "a"}],
}


def transformers_renders(
    template: str, conversation: list[dict[str, Any]], special: dict[str, str], **options: Any
) -> Any:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template([conversation], chat_template=template, **options, **special)
        return rendered[0]
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str) -> None:
    template, special = TEMPLATES[name]
    ours = ChatTemplate(template, special)
    rendered = 0
    for (_, conversation), tools, prompt in itertools.product(CONVERSATIONS.items(), (None, [TOOL]), (True, False)):
        expected = transformers_renders(template, conversation, special, tools=tools, add_generation_prompt=prompt)
        try:
            found = ours.render(conversation, tools, prompt)
            rendered += 1
        except TemplateRefused:
            found = "TemplateError"
        assert found == expected or (found == "TemplateError" and expected.endswith("Error")), (conversation, tools)
    assert rendered >= 8


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("begun", ["The capital is", "Blank at the end: "])
def test_a_continued_message_is_that_of_transformers(name: str, begun: str) -> None:
    template, special = TEMPLATES[name]
    conversation = [*CONVERSATIONS["one"], {"role": "assistant", "content": begun}]
    expected = transformers_renders(template, conversation, special, continue_final_message=True)
    try:
        found = ChatTemplate(template, special).render(conversation, continue_final_message=True)
    except TemplateRefused:
        found = "TemplateError"
    assert found == expected or (found == "TemplateError" and expected.endswith("Error"))
    assert found.rstrip().endswith(begun.rstrip())


def test_a_template_that_cannot_be_used_says_why() -> None:
    with pytest.raises(TemplateRefused, match="cannot be used"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(TemplateRefused, match="refuses these messages: only users"):
        ChatTemplate("{{ raise_exception('only users') }}", {}).render([])


INJECTIONS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages[0].get.__self__.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['os'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ messages|attr('__class__') }}",
    "{{ messages[0]|attr('__class__')|attr('__base__') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{{ ''['__class__'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ messages[0].number.__class__ }}",
    "{{ messages[0].number|attr('__init__')|attr('__globals__') }}",
]


@pytest.mark.parametrize("source", INJECTIONS)
def test_a_template_reaches_nothing_of_python(source: str) -> None:
    try:
        text = ChatTemplate(source, {}).render([{"role": "user", "content": "x", "number": 5.0}])
    except TemplateRefused:
        return
    assert text.strip() in ("", "none"), text


def test_what_messages_hold_is_text_and_no_template() -> None:
    template, special = TEMPLATES["chatml"]
    for source in INJECTIONS:
        assert source in ChatTemplate(template, special).render([{"role": "user", "content": source}])


@pytest.mark.parametrize(
    "source",
    [
        "{% for k, v in messages[0].x.items() %}{{ k }}={{ v|tojson }},{{ v }},{{ v is number }};{% endfor %}",
        "{{ messages[0]|tojson }} {{ tools|tojson(indent=2) }} {{ messages[0].x }} {{ {'k': messages[0].x.a}|tojson }}",
        "{{ 'a' is sequence }} {{ messages is sequence }} {{ messages[0] is sequence }} {{ 1 is sequence }}",
    ],
)
def test_numbers_and_kinds_of_values_are_those_of_jinja(source: str) -> None:
    message = {"role": "user", "x": {"a": 5.0, "b": [-2.0, 0.5], "c": True, "d": 7, "e": "5.0", "f": 1e300}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"minimum": 1.0}}}]
    wanted = transformers_renders(source, [message], {}, tools=tools)
    assert ChatTemplate(source, {}).render([message], tools) == wanted


SEEING = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role.upper() + ': ' }}{% endif %}"
    "{% for part in m.content|selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in m.content|selectattr('type', 'equalto', 'text') %}{{ part.text + ' ' }}{% endfor %}{% endfor %}"
)


def test_a_template_that_takes_lists_alone_shows_texts_too() -> None:
    """As in vLLM: templates of vision models accept only lists of parts, and would omit a plain text."""
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in CONVERSATIONS["turns"]]
    wanted = transformers_renders(SEEING, parts, {})
    template = ChatTemplate(SEEING, {})
    assert "One?" in wanted and template.render(CONVERSATIONS["turns"]) == template.render(parts) == wanted
    assert template.render(CONVERSATIONS["turns"], continue_final_message=True).endswith("Three?")


BOMBS = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{% set ns = namespace(x='aaaaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ range(10**12)|list }}",
    "{{ (range(99999)|list|string) * 999999 }}",
]


def test_a_grammar_that_takes_long_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither conversations nor other grammars wait: the first process hangs, without a time limit."""
    monkeypatch.setattr("icc.runtime.server.api.sandbox.SECONDS", 1000.0)
    schema = of_schema({"type": "integer"})

    async def main() -> list[str]:
        sandbox = Sandbox(TemplateSource("fine", {}))
        await sandbox.lower(schema)
        [checker] = sandbox._checkers._running
        checker.send_signal(signal.SIGSTOP)
        held = asyncio.create_task(sandbox.lower(schema))
        try:
            await asyncio.sleep(0)
            answers = [
                await sandbox.lower(schema),
                await sandbox.render(TemplateInput([{"role": "user", "content": "x"}])),
            ]
            assert not held.done()
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
            assert checker.returncode is not None
            return answers
        finally:
            await sandbox.stop()

    found = asyncio.run(main())
    assert json.loads(found[0]) and found[1] == "fine"


def test_a_machine_too_busy_to_start_a_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icc.runtime.server.api.sandbox._START_S", 0.0)

    async def main() -> None:
        sandbox = Sandbox(TemplateSource("fine", {}))
        with pytest.raises(BusyError, match="did not start within 0 s") as busy:
            await sandbox.start()
        assert not sandbox._renderers._running and as_http(busy.value).status == 503

    asyncio.run(main())


def test_a_process_that_cannot_start_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icc.runtime.server.api.sandbox.sys.executable", "/bin/false")

    async def main() -> None:
        sandbox = Sandbox(TemplateSource("fine", {}))
        with pytest.raises(MissingExtraError, match="ended when it started") as error:
            await sandbox.start()
        assert not sandbox._renderers._running and "icc-llm[serve]" in (error.value.hint or "")

    asyncio.run(main())


def test_bombs_end_in_words_and_the_next_request_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bomb is only for these messages: a new process first renders others, to learn what the template reads. The
    next request gets more time, which it needs only if this machine is busy."""

    async def defuse(sandbox: Sandbox) -> None:
        with pytest.raises(RequestError):
            await sandbox.render(TemplateInput([{"role": "user", "content": "x"}]))

    async def all_of_them() -> list[str]:
        texts = ["{% if messages[0].content == 'x' %}" + bomb + "{% else %}fine{% endif %}" for bomb in BOMBS]
        sandboxes = [Sandbox(TemplateSource(text, {})) for text in texts]
        try:
            await asyncio.gather(*map(defuse, sandboxes))
            monkeypatch.setattr("icc.runtime.server.api.sandbox.SECONDS", 60.0)
            next_one = TemplateInput([{"role": "user", "content": "ok"}])
            return await asyncio.gather(*(one.render(next_one) for one in sandboxes))
        finally:
            await asyncio.gather(*(one.stop() for one in sandboxes))

    assert asyncio.run(all_of_them()) == ["fine"] * len(BOMBS)
