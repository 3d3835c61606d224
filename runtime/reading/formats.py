"""How a model writes what is no plain answer: calls of tools, and thoughts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

ID = "\0"  # stands in a format where an id of the call does

# what is read or matched as one: a mark in angle or square brackets, a word, white space, any other character
_ATOM = re.compile(r"<[^<>\s]*>|\[/?[A-Z][A-Z_]*\]|\w+|\s+|[^\w\s]")


def atoms(text: str) -> list[str]:
    """The text in the pieces in which marks are compared."""
    return _ATOM.findall(text)


def marks(text: str) -> list[str]:
    """Its atoms without the white space, which models write as they like."""
    return [atom for atom in atoms(text) if not atom.isspace()]


@dataclass(frozen=True)
class CallFormat:
    """`opening` CALL (`separator` CALL)* `closing`, where a CALL is `before` NAME `between` ARGUMENTS `after`.

    shape: of the call. "object": JSON with the name and the arguments in it (then `before` ends where that begins, and
    `name_key` and `arguments_key` are its keys); "json": JSON arguments behind the name; "tagged": (`key_open` KEY
    `key_close` VALUE `value_close`)* with values as they are; "loose": {KEY:VALUE} without quotes but those of strings,
    which are `quote`; "python": (KEY=VALUE) with Python's literals; "messages": JSON in a message of its own, as
    OpenAI's harmony has it. parallel: whether an answer may hold several calls. ID stands for an id in a text.
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
        """The marks that come before a call; those of `opening` are there before the first one only."""
        return marks(self.opening) + marks(self.before)

    @cached_property
    def triggers(self) -> list[str]:
        """The marks with which calls begin; none where a call begins with its own brackets."""
        firsts = [marks(text)[0] for text in (self.opening + self.before, self.before) if marks(text)]
        return sorted({mark for mark in firsts if len(mark) > 1})

    @cached_property
    def tails(self) -> list[str]:
        """The marks that may follow a call, and are no text."""
        return sorted({*marks(self.after), *marks(self.separator), *marks(self.closing)} - set(self.triggers))


@dataclass(frozen=True)
class Thinking:
    """The marks around a thought."""

    open: str
    close: str


@dataclass(frozen=True)
class AnswerFormat:
    """What a chat template tells of the answers of its model.

    messages: whether an answer is a sequence of messages in channels (harmony). ids: what ids of calls the template
    takes: any, those of nine letters and digits, or those that name the tool ("functions.NAME:0"). arguments_as_text:
    whether it takes arguments as JSON text only. developer: whether it knows that role. special: whether marks are
    special tokens, which the text must then show; `hidden` are the special tokens that no answer shows. generic:
    whether it knows no calls, which the model is told of in words, see generic.py. system: whether it shows what a
    system message says.
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
        """Whether the prompt ends inside a thought: where one begins, or in that of an answer to be continued."""
        if self.thinking is None:
            return False
        begins = prompt.rstrip().endswith(self.thinking.open)
        return begins or continued.rfind(self.thinking.open) > continued.rfind(self.thinking.close)

    def without_thought(self, prompt: str) -> str:
        """The prompt for an answer that begins with what is said: of a constrained one every token counts."""
        if self.messages:
            return prompt if prompt.rstrip().endswith("<|message|>") else prompt + "<|channel|>final<|message|>"
        if self.thinks_after(prompt):
            assert self.thinking is not None
            return f"{prompt.rstrip()}\n\n{self.thinking.close}\n\n"
        return prompt
