"""How a model writes tool calls and thoughts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

ID = "\0"  # placeholder in a format for the id of a call

# units of reading and matching: a mark in angle or square brackets, a word, white space, any other character
_ATOM = re.compile(r"<[^<>\s]*>|\[/?[A-Z][A-Z_]*\]|\w+|\s+|[^\w\s]")


def atoms(text: str) -> list[str]:
    """The text split into the units in which marks are compared."""
    return _ATOM.findall(text)


def marks(text: str) -> list[str]:
    """The atoms of a text without white space, which models write as they like."""
    return [atom for atom in atoms(text) if not atom.isspace()]


@dataclass(frozen=True)
class CallFormat:
    """`opening` CALL (`separator` CALL)* `closing`, where a CALL is `before` NAME `between` ARGUMENTS `after`.

    shape: the form of a call. "object": a JSON object that contains name and arguments (`before` ends where it begins,
    `name_key` and `arguments_key` are its keys); "json": JSON arguments after the name; "tagged": (`key_open` KEY
    `key_close` VALUE `value_close`)* with unquoted values; "loose": {KEY:VALUE} in which only strings have quotes,
    namely `quote`; "python": (KEY=VALUE) with Python literals; "messages": JSON in a separate message, as in OpenAI's
    harmony. parallel: whether an answer may have several calls. ID in a text stands for an id.
    """

    shape: Literal["object", "json", "tagged", "loose", "python", "messages"]
    opening: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    separator: str = ""
    closing: str = ""
    parallel: bool = True
    name_key: str = "name"
    arguments_key: str = "arguments"
    key_open: str = ""
    key_close: str = ""
    value_close: str = ""
    quote: str = ""

    @cached_property
    def lead(self) -> list[str]:
        """The marks before a call; those of `opening` only come before the first call."""
        return marks(self.opening) + marks(self.before)

    @cached_property
    def triggers(self) -> list[str]:
        """The marks with which calls begin; none if a call begins with its own brackets."""
        firsts = [marks(text)[0] for text in (self.opening + self.before, self.before) if marks(text)]
        return sorted({mark for mark in firsts if len(mark) > 1})

    @cached_property
    def tails(self) -> list[str]:
        """The marks that may follow a call and do not count as text."""
        return sorted({*marks(self.after), *marks(self.separator), *marks(self.closing)} - set(self.triggers))


@dataclass(frozen=True)
class Thinking:
    """The marks around a thought."""

    open: str
    close: str


@dataclass(frozen=True)
class AnswerFormat:
    """The format of a model's answers, as found from its chat template.

    calls: None if the model has no format for tool calls; thinking: None if it has none for thoughts. messages: whether
    an answer is a sequence of messages in channels (harmony). ids: which ids of calls the template accepts: any, nine
    letters and digits, or those that name the tool ("functions.NAME:0"). arguments_as_text: whether it only accepts
    arguments as JSON text. developer: whether it knows that role. special: whether marks are special tokens, which the
    text must then include; `hidden` are the special tokens that are never shown. generic: whether the template has no
    tool calls, so that tools are described in words, see generic.py. system: whether it shows system messages.
    """

    calls: CallFormat | None = None
    thinking: Thinking | None = None
    messages: bool = False
    ids: Literal["any", "short", "named"] = "any"
    arguments_as_text: bool = False
    developer: bool = False
    special: bool = False
    hidden: frozenset[str] = frozenset()
    generic: bool = False
    system: bool = True

    def thinks_after(self, prompt: str, continued: str = "") -> bool:
        """Whether the prompt ends inside a thought, which it begins itself, or which the answer to be continued
        began."""
        if self.thinking is None:
            return False
        begins = prompt.rstrip().endswith(self.thinking.open)
        return begins or continued.rfind(self.thinking.open) > continued.rfind(self.thinking.close)

    def without_thought(self, prompt: str) -> str:
        """The prompt with any thought closed, for an answer whose every token must follow a grammar."""
        if self.messages:
            return prompt if prompt.rstrip().endswith("<|message|>") else prompt + "<|channel|>final<|message|>"
        if self.thinks_after(prompt):
            assert self.thinking is not None
            return f"{prompt.rstrip()}\n\n{self.thinking.close}\n\n"
        return prompt
