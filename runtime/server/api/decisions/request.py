"""The body of POST /v1/decisions, as OpenAI's client sends it. Fields that only describe items are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from .. import limits
from ..fields import Name, Text
from ..openresponses.request import (
    FunctionCallItem,
    FunctionCallOutput,
    Id,
    InputText,
    OutputTextPart,
    Parts,
    PlainText,
    ResponseRefusalPart,
    typed_messages,
)

_Called = Annotated[str, Meta(max_length=limits.SPEAKER_CHARS)]


class InputJson(Struct, tag_field="type", tag="input_json", frozen=True):
    """One object or several, which the model reads as compact JSON."""

    data: dict[str, Any] | list[dict[str, Any]]


DecisionPart = InputText | OutputTextPart | PlainText | ResponseRefusalPart | InputJson
DecisionContent = Text | Annotated[list[DecisionPart], Meta(max_length=limits.MESSAGES)]


class DecisionMessage(Struct, tag_field="type", tag="message", frozen=True):
    """A message. `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: DecisionContent


class CustomCall(Struct, tag_field="type", tag="custom_tool_call", frozen=True):
    """A call whose input is a text."""

    call_id: Id
    name: Name
    input: Text


class CustomCallOutput(Struct, tag_field="type", tag="custom_tool_call_output", frozen=True):
    """The result of the call with that id."""

    call_id: Id
    output: Text | Parts


DecisionItem = DecisionMessage | FunctionCallItem | FunctionCallOutput | CustomCall | CustomCallOutput
Instructions = Text | Annotated[list[InputText | InputJson], Meta(max_length=limits.MESSAGES)]


class PredicateQuestion(Struct, tag_field="type", tag="predicate", frozen=True):
    """How likely is it that a statement about the input is true?"""

    instructions: Instructions
    name: _Called | None = None


class ChoiceOption(Struct, frozen=True):
    """A choice; a text and a boolean that read the same are two choices."""

    value: Text | bool
    description: Text | None = None

    @property
    def shown(self) -> str:
        """The value as the model reads it."""
        return self.value if isinstance(self.value, str) else str(self.value).lower()


class ChoiceQuestion(Struct, tag_field="type", tag="choice", frozen=True):
    """Which of these is it?"""

    instructions: Instructions
    choices: Annotated[list[ChoiceOption], Meta(min_length=2, max_length=limits.OPTIONS)]
    name: _Called | None = None


class ScoreLevel(Struct, frozen=True):
    """A level; the first is the lowest, of value 0."""

    label: Text
    description: Text | None = None

    @property
    def shown(self) -> str:
        """The level as the model reads it."""
        return self.label


class ScoreQuestion(Struct, tag_field="type", tag="score", frozen=True):
    """How much is it, on this scale?"""

    instructions: Instructions
    levels: Annotated[list[ScoreLevel], Meta(min_length=2, max_length=limits.OPTIONS)]
    name: _Called | None = None


Question = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class CacheOptions(Struct, frozen=True):
    """Accepted and ignored: the prefix cache is always used."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] = "30m"


class DecisionRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /v1/decisions. prompt_cache_key: separates cached prefixes, as cache_salt of a completion.
    prompt_cache_options and safety_identifier are accepted and ignored; the fields after them are extensions."""

    model: str = ""
    input: Text | Annotated[list[DecisionItem], Meta(min_length=1, max_length=limits.MESSAGES)]
    questions: Annotated[list[Question], Meta(min_length=1, max_length=limits.QUESTIONS)]
    prompt_cache_key: Annotated[str, Meta(max_length=256)] | None = None
    prompt_cache_options: CacheOptions | None = None
    safety_identifier: str | None = None
    priority: Annotated[int, limits.bound("priority")] = 0
    deadline: Annotated[float, limits.bound("deadline")] | None = None

    prepare = staticmethod(typed_messages)
