"""The bodies of POST /v1/messages and of its count_tokens, as Anthropic defines them. A field that this server cannot
honour is refused by name; fields that only describe blocks (`citations`) are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from .. import limits
from ..fields import Int64, Name, Stop, Text

Id = Annotated[str, Meta(min_length=1, max_length=256)]


class CacheControl(Struct, frozen=True):
    """The prompt up to the end of this block is kept for `ttl` after its last use, by default five minutes."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Struct, tag_field="type", tag="text", frozen=True):
    """A text."""

    text: Text
    cache_control: CacheControl | None = None


class TextOnly(Struct, frozen=True):
    """A text block, in a place where no other kind is allowed."""

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking", frozen=True):
    """What the model thought; the signature is ignored."""

    thinking: Text


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking", frozen=True):
    """Thoughts that another server has encrypted; ignored."""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use", frozen=True):
    """A call of a tool by the model."""

    id: Id
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Struct, tag_field="type", tag="tool_result", frozen=True):
    """The result of a tool call."""

    tool_use_id: Id
    content: Text | Annotated[list[TextOnly], Meta(max_length=limits.MESSAGES)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


UserBlock = TextBlock | ToolResultBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class UserTurn(Struct, tag_field="role", tag="user", frozen=True):
    """What the user said, or results of tools."""

    content: Text | Annotated[list[UserBlock], Meta(max_length=limits.MESSAGES)]


class AssistantTurn(Struct, tag_field="role", tag="assistant", frozen=True):
    """What the model answered before."""

    content: Text | Annotated[list[AssistantBlock], Meta(max_length=limits.MESSAGES)]


class SystemTurn(Struct, tag_field="role", tag="system", frozen=True):
    """An instruction between turns."""

    content: Text | Annotated[list[TextOnly], Meta(max_length=limits.MESSAGES)]


class ToolDefinition(Struct, frozen=True):
    """A tool of the client. `input_schema` is a JSON schema of its input."""

    name: Name
    input_schema: dict[str, Any]
    description: Text | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None


class AutoChoice(Struct, tag_field="type", tag="auto", frozen=True):
    """The model chooses whether to use a tool."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag_field="type", tag="any", frozen=True):
    """Some tool must be used."""

    disable_parallel_tool_use: bool | None = None


class ToolChoice(Struct, tag_field="type", tag="tool", frozen=True):
    """The tool of that name must be used."""

    name: Name
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, tag_field="type", tag="none", frozen=True):
    """No tool may be used."""


class ThinkingEnabled(Struct, tag_field="type", tag="enabled", frozen=True):
    """The model's template is asked to enable thinking; how long the model thinks is not limited."""

    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class ThinkingAdaptive(Struct, tag_field="type", tag="adaptive", frozen=True):
    """The model's template decides whether the model thinks."""


class ThinkingDisabled(Struct, tag_field="type", tag="disabled", frozen=True):
    """The model's template is asked to disable thinking."""


class OutputFormat(Struct, frozen=True):
    """The answer is a JSON value that matches a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True):
    """The form of the answer; `effort` is accepted and ignored."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: the fields of a request that the model reads."""

    model: str = ""
    messages: Annotated[list[UserTurn | AssistantTurn | SystemTurn], Meta(min_length=1, max_length=limits.MESSAGES)]
    system: Text | Annotated[list[TextOnly], Meta(max_length=limits.MESSAGES)] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=limits.TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class Metadata(Struct, frozen=True):
    """The user of the client; ignored."""

    user_id: str | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """POST /v1/messages. The fields from `min_p` on are extensions, as in chat completions."""

    max_tokens: Annotated[int, limits.bound("max_tokens", low=1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=limits.STOPS)] | None = None
    temperature: Annotated[float, limits.bound("temperature")] | None = None
    top_p: Annotated[float, limits.bound("top_p")] | None = None
    top_k: Annotated[int, limits.bound("top_k")] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    min_p: Annotated[float, limits.bound("min_p")] | None = None
    repetition_penalty: Annotated[float, limits.bound("repetition_penalty")] | None = None
    seed: Annotated[int, limits.bound("seed")] | None = None
    priority: Annotated[int, limits.bound("priority")] = 0
    deadline: Annotated[float, limits.bound("deadline")] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    chat_template_kwargs: dict[Name, str | Int64 | float | bool | None] | None = None
