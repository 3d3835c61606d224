"""The messages of a conversation and the tools in it, as clients send and replay them.

Unknown fields are ignored: clients send back what this or another server gave them, and add their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from . import limits
from .fields import Name, Text


class TextPart(Struct, tag_field="type", tag="text", frozen=True):
    """A text: a part of a message."""

    text: Text


class RefusalPart(Struct, tag_field="type", tag="refusal", frozen=True):
    """The text of a refusal by an assistant."""

    refusal: Text


Content = Text | Annotated[list[TextPart | RefusalPart], Meta(max_length=limits.MESSAGES)]
Speaker = Annotated[str, Meta(max_length=limits.SPEAKER_CHARS)]


class FunctionCall(Struct, frozen=True):
    """`arguments` is JSON in a string, as in OpenAI's API, or an object, as in others."""

    name: Speaker
    arguments: Text | dict[str, Any] | None = None


def text_of(content: Content | None) -> str:
    """The text of a content; "" for None."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


class MessageToolCall(Struct, frozen=True):
    """A call in an earlier answer."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class SystemMessage(Struct, tag_field="role", tag="system", frozen=True):
    """An instruction to the model."""

    content: Content
    name: Speaker | None = None


class DeveloperMessage(Struct, tag_field="role", tag="developer", frozen=True):
    """An instruction to the model, under its newer name."""

    content: Content
    name: Speaker | None = None


class UserMessage(Struct, tag_field="role", tag="user", frozen=True):
    """What the user said."""

    content: Content
    name: Speaker | None = None


class AssistantMessage(Struct, tag_field="role", tag="assistant", frozen=True):
    """`reasoning_content`, or `reasoning`, is what the model thought, for templates that show it again."""

    content: Content | None = None
    name: Speaker | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=limits.TOOLS)] | None = None
    function_call: FunctionCall | None = None


class ToolMessage(Struct, tag_field="role", tag="tool", frozen=True):
    """The result of the call with that id."""

    content: Content
    tool_call_id: str
    name: Speaker | None = None


class FunctionMessage(Struct, tag_field="role", tag="function", frozen=True):
    """The result of a call in the form that OpenAI had before tools."""

    content: Content | None
    name: Speaker


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


class ToolFunction(Struct, frozen=True):
    """`parameters` is a JSON schema of the arguments."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True):
    """A function that the model may call."""

    function: ToolFunction
    type: Literal["function"] = "function"


class FunctionName(Struct, frozen=True):
    """A function by its name."""

    name: Name


class NamedTool(Struct, tag_field="type", tag="function", frozen=True):
    """That tool must be called."""

    function: FunctionName


class ToolName(Struct, frozen=True):
    """A tool of the request by its name."""

    function: FunctionName
    type: Literal["function"] = "function"


class ToolSubset(Struct, frozen=True):
    """The tools of the request that may be called. mode "required": one of them must be."""

    tools: Annotated[list[ToolName], Meta(min_length=1, max_length=limits.TOOLS)]
    mode: Literal["auto", "required"] = "auto"


class AllowedTools(Struct, tag_field="type", tag="allowed_tools", frozen=True):
    """Only some of the tools may be called."""

    allowed_tools: ToolSubset


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


def question_of(messages: Sequence[Message]) -> str:
    """The text of the last user message, or of the last message if there is none."""
    asked = [message for message in messages if isinstance(message, UserMessage)]
    return text_of((asked or messages)[-1].content)
