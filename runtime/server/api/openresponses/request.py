"""The body of POST /v1/responses, as OpenAI and Open Responses define it. A field that this server cannot honour is
refused by name.

Clients send items back as they received them, so fields that only describe items (`status`, `phase`, `annotations`, and
what other servers add) are ignored. At the top level an unknown field is an error, so that typos are noticed.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from .. import limits
from ..errors import HttpError
from ..fields import Int64, Name, Stop, Text

Id = Annotated[str, Meta(min_length=1, max_length=256)]


class InputText(Struct, tag_field="type", tag="input_text", frozen=True):
    """A text of the input."""

    text: Text


class OutputTextPart(Struct, tag_field="type", tag="output_text", frozen=True):
    """A text of an earlier answer."""

    text: Text


class PlainText(Struct, tag_field="type", tag="text", frozen=True):
    """A text, in the form that some clients send."""

    text: Text


class SummaryText(Struct, frozen=True):
    """A summary of thoughts."""

    type: Literal["summary_text"]
    text: Text


class ReasoningText(Struct, tag_field="type", tag="reasoning_text", frozen=True):
    """The thoughts themselves."""

    text: Text


class ResponseRefusalPart(Struct, tag_field="type", tag="refusal", frozen=True):
    """The text of a refusal by the model."""

    refusal: Text


Part = InputText | OutputTextPart | PlainText | ResponseRefusalPart
Parts = Annotated[list[Part], Meta(max_length=limits.MESSAGES)]


class InputMessage(Struct, tag_field="type", tag="message", frozen=True):
    """A message. `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Parts

    @property
    def said(self) -> str:
        """The text of the message, its parts joined."""
        return text_of(self.content)


class FunctionCallItem(Struct, tag_field="type", tag="function_call", frozen=True):
    """A call that the model has made; `arguments` is JSON."""

    call_id: Id
    name: Name
    arguments: Text


class FunctionCallOutput(Struct, tag_field="type", tag="function_call_output", frozen=True):
    """The result of the call with that id."""

    call_id: Id
    output: Text | Parts


class ReasoningItem(Struct, tag_field="type", tag="reasoning", frozen=True):
    """What the model thought before it answered."""

    summary: list[SummaryText] = []
    content: list[ReasoningText | PlainText] | None = None


class CompactionItem(Struct, tag_field="type", tag="compaction", frozen=True):
    """The summary of a conversation by /v1/responses/compact."""

    encrypted_content: Annotated[Text, Meta(extra_json_schema={"enum": ["", "YQ=="]})]


Item = InputMessage | FunctionCallItem | FunctionCallOutput | ReasoningItem | CompactionItem


def text_of(content: str | list[Part]) -> str:
    """The texts of a content, joined."""
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, ResponseRefusalPart) else part.text for part in content)


def summary_of(item: CompactionItem) -> str:
    """The text of a summary for the model. HttpError 400 if this server did not make it."""
    try:
        text = base64.b64decode(item.encrypted_content, validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise HttpError(400, "input: a compaction was not made by this server", "input", "invalid_value") from error
    return f"Summary of the conversation so far:\n{text}"


def typed_messages(body: Any) -> Any:
    """The body, with the `type` of messages that lack it added."""
    if isinstance(body, dict) and isinstance(items := body.get("input"), list):
        for item in items:
            if isinstance(item, dict) and "role" in item:
                item.setdefault("type", "message")
    return body


class FunctionTool(Struct, frozen=True):
    """`parameters` is a JSON schema of the arguments."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Struct, tag_field="type", tag="function", frozen=True):
    """The function of that name must be called."""

    name: Name


class AllowedTool(Struct, frozen=True):
    """A function of the request by its name."""

    type: Literal["function"]
    name: Name


class ResponseAllowedTools(Struct, tag_field="type", tag="allowed_tools", frozen=True):
    """The model may, or must, call only these tools."""

    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=limits.TOOLS)]
    mode: Literal["auto", "required"] = "auto"


class PlainFormat(Struct, tag_field="type", tag="text", frozen=True):
    """Any text."""


class JsonObject(Struct, tag_field="type", tag="json_object", frozen=True):
    """A JSON object."""


class ResponseJsonSchema(Struct, tag_field="type", tag="json_schema", frozen=True):
    """A JSON value that matches a schema."""

    name: Name
    schema: dict[str, Any]
    description: Text | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True):
    """The form of the answer; `verbosity` is accepted and ignored."""

    format: PlainFormat | JsonObject | ResponseJsonSchema | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Struct, frozen=True):
    """How much the model's template asks it to think; `summary` is accepted and ignored."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Struct, frozen=True):
    """Accepted and ignored: events are never padded."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /v1/responses. The fields from `seed` on are extensions, as in chat completions."""

    model: str = ""
    input: Text | Annotated[list[Item], Meta(min_length=1, max_length=limits.MESSAGES)]
    instructions: Text | None = None
    previous_response_id: Id | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, limits.bound("max_completion_tokens", low=1)] | None = None
    temperature: Annotated[float, limits.bound("temperature")] | None = None
    top_p: Annotated[float, limits.bound("top_p")] | None = None
    top_logprobs: Annotated[int, limits.bound("top_logprobs")] | None = None
    presence_penalty: Annotated[float, limits.bound("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, limits.bound("frequency_penalty")] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=limits.TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | ResponseAllowedTools | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[str], Meta(max_length=16)] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    background: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    seed: Annotated[int, limits.bound("seed")] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=limits.STOPS)] | None = None
    top_k: Annotated[int, limits.bound("top_k")] | None = None
    min_p: Annotated[float, limits.bound("min_p")] | None = None
    repetition_penalty: Annotated[float, limits.bound("repetition_penalty")] | None = None
    priority: Annotated[int, limits.bound("priority")] = 0
    deadline: Annotated[float, limits.bound("deadline")] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    chat_template_kwargs: dict[Name, str | Int64 | float | bool | None] | None = None

    prepare = staticmethod(typed_messages)
