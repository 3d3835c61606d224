"""ChatTemplate: a checkpoint's Jinja template, rendered by minijinja within limits. It can run no code."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from typing import Any

import minijinja

from ...errors import RequestError

FUEL = 1_000_000  # steps of minijinja's machine for one rendering
MAX_OUTPUT = 8 << 20  # characters
# transformers marks what an assistant said; training needs that, a prompt does not
_GENERATION = ("generation", "endgeneration")


class TemplateRefused(RequestError):
    """The template raised an error on purpose, does not know these messages, or hit a limit."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="messages")


class ChatTemplate:
    """A template with the settings and globals that transformers gives it.

    special_tokens: variables such as bos_token. Raises TemplateRefused if the text is no template of this language.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        self._environment = minijinja.Environment(
            fuel=FUEL,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_escape_callback=lambda name: False,
            filters={"tojson": _tojson},
            tests={"iterable": _is_iterable},
            globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
        )
        try:
            self._environment.add_template("chat", _without_generation_marks(source))
        except minijinja.TemplateError as error:
            raise TemplateRefused(f"the chat template cannot be used: {_words(error)}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation. Raises TemplateRefused."""
        try:
            text = self._environment.render_template(
                "chat",
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **variables},
            )
        except minijinja.TemplateError as error:
            raise TemplateRefused(f"the chat template refuses these messages: {_words(error)}") from error
        except Refusal as error:
            raise TemplateRefused(f"the chat template refuses these messages: {error}") from error
        if len(text) > MAX_OUTPUT:
            raise TemplateRefused(f"the chat template makes {len(text)} characters of these messages")
        return text


class Refusal(Exception):
    """What a template raises."""


def _words(error: Exception) -> str:
    """The first line of an error, without its place in the source."""
    return (str(error).splitlines() or ["error"])[0][:200]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: characters stay as they are, nothing is escaped for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=tuple(separators) if separators else None,  # type: ignore[arg-type]
        sort_keys=sort_keys,
    )


def _is_iterable(value: Any) -> bool:
    """As in Jinja: none is not, though minijinja would go over it as over an empty list."""
    return isinstance(value, str | Iterable)


def _raise_exception(message: str) -> str:
    raise Refusal(str(message)[:200])


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(str(form)[:100])


def _without_generation_marks(source: str) -> str:
    """{% generation %} is no block of Jinja. An `if` that is always true keeps the control of white space."""
    import re

    start, end = _GENERATION
    source = re.sub(rf"({{%[-+]?)\s*{start}\s*([-+]?%}})", r"\1 if true \2", source)
    return re.sub(rf"({{%[-+]?)\s*{end}\s*([-+]?%}})", r"\1 endif \2", source)
