"""ChatTemplate: a checkpoint's Jinja template, rendered by minijinja within limits. It cannot run code."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import minijinja

from ..errors import RequestError

DEFAULT, TOOL_USE = "default", "tool_use"  # names that transformers uses
FUEL = 1_000_000  # steps of minijinja's virtual machine for one rendering
MAX_OUTPUT = 8 << 20  # characters
# marks of an assistant's text, which training needs and a prompt does not
_GENERATION = ("generation", "endgeneration")
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the place where a message is to be continued, as in transformers
_SAID = "SOMETHING_SAID"  # a user's text, to test whether a template shows it


class TemplateRefused(RequestError):
    """The template raised an error on purpose, does not support these messages, or exceeded a limit."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="messages")


class ChatTemplate:
    """A template with transformers' settings and globals.

    source: the default template, "" if there is none. special_tokens: variables such as bos_token. named: further
    templates by name; None: there are none. Raises TemplateRefused if a text is no valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], named: Mapping[str, str] | None = None) -> None:
        self._special_tokens = special_tokens
        self._names = [*([DEFAULT] if source else []), *(named or {})]
        self._lists: dict[str, bool] = {}  # by template, once tested: whether it takes contents as lists
        self._environment = minijinja.Environment(
            fuel=FUEL,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_escape_callback=lambda name: False,
            filters={"tojson": _tojson},
            tests={"iterable": _is_iterable, "sequence": _is_sequence, "number": _is_number},
            globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
        )
        try:
            for name, text in {**(named or {}), **({DEFAULT: source} if source or not named else {})}.items():
                self._environment.add_template(name, _without_generation_marks(text))
        except minijinja.TemplateError as error:
            raise TemplateRefused(f"the chat template cannot be used: {_words(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation: it ends where the next message begins (`add_generation_prompt`), or within the
        last message, which the model continues (`continue_final_message`). tools: None if there are none. template: the
        name of a template; None: "tool_use" if there are tools, else "default". Raises TemplateRefused."""
        chosen = self._chosen(template, bool(tools))
        if continue_final_message:
            return self._render_continued(chosen, messages, tools, variables)
        return self._render(chosen, self._suited(chosen, messages), tools, add_generation_prompt, variables)

    def _chosen(self, name: str | None, tools: bool) -> str:
        chosen = name or (TOOL_USE if tools and TOOL_USE in self._names else DEFAULT)
        if self._names and chosen not in self._names:
            wanted = "has no chat template named " + repr(chosen) if name else "has no default chat template"
            raise TemplateRefused(f"the model {wanted}: choose one of {', '.join(self._names)} by chat_template")
        return chosen

    def _render_continued(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: dict[str, Any],
    ) -> str:
        """As transformers does: a mark is appended to the last message, and the text after the mark is cut off."""
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str):
            raise TemplateRefused("the last message has no text that could be continued")
        marked = [*messages[:-1], {**messages[-1], "content": content + _CONTINUED}]
        text = self._render(name, self._suited(name, marked), tools, False, variables)
        at = text.rfind(_CONTINUED.strip())
        if at < 0 or content.strip() not in text:
            raise TemplateRefused("the chat template leaves out the last message, so that it cannot be continued")
        kept = text[:at]
        return kept if text.startswith(_CONTINUED, at) else kept.rstrip()

    def _suited(self, name: str, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages, with contents as lists of parts if the template only shows such lists. Templates of models with
        vision are often so, and would silently leave out a content that is a text."""
        if name not in self._lists:
            self._lists[name] = not self._shows(name, _SAID) and self._shows(name, _as_list(_SAID))
        if not self._lists[name]:
            return messages
        return [{**message, "content": _as_list(message.get("content"))} for message in messages]

    def _shows(self, name: str, content: Any) -> bool:
        try:
            return _SAID in self._render(name, [{"role": "user", "content": content}], None, True, {})
        except TemplateRefused:
            return False

    def _render(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
    ) -> str:
        try:
            text = self._environment.render_template(
                name,
                messages=_kept_floats(messages),
                tools=_kept_floats(tools),
                add_generation_prompt=add_generation_prompt,
                **{"documents": None, **self._special_tokens, **variables},
            )
        except minijinja.TemplateError as error:
            raise TemplateRefused(f"the chat template refuses these messages: {_words(error)}") from error
        except RaisedByTemplate as error:
            raise TemplateRefused(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # the template calls a method that does not exist, or with wrong arguments
            raise TemplateRefused(f"the chat template cannot be rendered: {_words(error)}") from error
        if len(text) > MAX_OUTPUT:
            raise TemplateRefused(f"the chat template makes {len(text)} characters of these messages")
        return text


def _as_list(content: Any) -> Any:
    """A text content as a list of one part; other contents unchanged."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class RaisedByTemplate(Exception):
    """Raised by a template's `raise_exception`."""


def _words(error: Exception) -> str:
    """The first line of an error, without its position in the source."""
    return (str(error).splitlines() or ["error"])[0][:200]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter tojson as in transformers: non-ASCII characters are kept, and nothing is escaped for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=tuple(separators) if separators else None,  # type: ignore[arg-type]
        sort_keys=sort_keys,
        default=_plain_float,
    )


class WholeFloat:
    """A float that is a whole number, such as 5.0, which minijinja would pass to filters as the integer 5."""

    def __init__(self, value: float) -> None:
        self._value = value

    def __str__(self) -> str:
        return repr(self._value)

    __repr__ = __str__


def _kept_floats(value: Any) -> Any:
    """A copy of a value in which floats that are whole numbers are WholeFloats."""
    if isinstance(value, float):
        return WholeFloat(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {key: _kept_floats(inner) for key, inner in value.items()}
    return [_kept_floats(inner) for inner in value] if isinstance(value, list | tuple) else value


def _plain_float(value: Any) -> float:
    if isinstance(value, WholeFloat):
        return value._value
    raise TypeError(f"{type(value).__name__} is no value of JSON")


def _is_iterable(value: Any) -> bool:
    """The test `iterable` as in Jinja: none is not iterable, though minijinja treats it as an empty list."""
    return isinstance(value, str | Iterable)


def _is_sequence(value: Any) -> bool:
    """The test `sequence` as in Jinja: texts and mappings count, too."""
    return isinstance(value, str | Sequence | Mapping)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | WholeFloat)


def _raise_exception(message: str) -> str:
    raise RaisedByTemplate(str(message)[:200])


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(str(form)[:100])


def _without_generation_marks(source: str) -> str:
    """Replace {% generation %}, which is no block of Jinja, by an `if` that is always true, which keeps white space
    control."""
    import re

    start, end = _GENERATION
    source = re.sub(rf"({{%[-+]?)\s*{start}\s*([-+]?%}})", r"\1 if true \2", source)
    return re.sub(rf"({{%[-+]?)\s*{end}\s*([-+]?%}})", r"\1 endif \2", source)
