"""The request bodies of the API, decoded strictly: an unknown field is an error, so that no typo goes unseen."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from . import limits

Name = Annotated[str, Meta(min_length=1, max_length=limits.NAME_CHARS, pattern="^[a-zA-Z0-9_.-]+$")]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1, extra_json_schema={"x-token": True})]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Tokens = Annotated[list[TokenId], Meta(min_length=1)]
Stop = Annotated[str, Meta(min_length=1, max_length=limits.STOP_CHARS)]
Text = Annotated[str, Meta(max_length=limits.BODY_BYTES)]

_text = {"type": "string"}
_token = {"type": "integer", "minimum": 0, "x-token": True}


def _texts_or_tokens(most: int) -> dict[str, Any]:
    """A text, token ids, or up to `most` of either kind."""
    many = {"type": "array", "minItems": 1, "maxItems": most}
    tokens = {"type": "array", "minItems": 1, "items": _token}
    return {"anyOf": [_text, {**many, "items": _text}, tokens, {**many, "items": tokens}]}


# JSON Schema tells the four kinds of prompt apart; msgspec takes one kind of array, so `prompts()` checks the rest
PROMPT_SCHEMA = _texts_or_tokens(limits.PROMPTS)
INPUT_SCHEMA = _texts_or_tokens(limits.INPUTS)


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """include_usage: a last chunk with the usage; continuous_usage_stats: the usage in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Struct, forbid_unknown_fields=True, frozen=True):
    name: Name
    schema: dict[str, Any] = {}
    description: str | None = None
    strict: bool | None = None


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True, frozen=True):
    """Any text."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True, frozen=True):
    """A JSON object."""


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, frozen=True):
    """A JSON value that a schema allows."""

    json_schema: JsonSchema


class RegexFormat(Struct, tag_field="type", tag="regex", forbid_unknown_fields=True, frozen=True):
    """Extension: a text that a regular expression, in the syntax of Rust's `regex` crate, matches as a whole."""

    regex: Annotated[
        str, Meta(min_length=1, max_length=limits.GRAMMAR_CHARS, extra_json_schema={"format": "rust-regex"})
    ]


class GrammarFormat(Struct, tag_field="type", tag="grammar", forbid_unknown_fields=True, frozen=True):
    """Extension: a text that a grammar in Lark's EBNF derives from its rule `start`."""

    grammar: Annotated[str, Meta(min_length=1, max_length=limits.GRAMMAR_CHARS, extra_json_schema={"format": "lark"})]


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat


class Common(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What completions and chat completions share. `user` and the fields after it are accepted and change nothing."""

    model: str
    n: Annotated[int, limits.bound("n")] = 1
    max_tokens: Annotated[int, limits.bound("max_tokens")] | None = None
    min_tokens: Annotated[int, limits.bound("min_tokens")] = 0
    temperature: Annotated[float, limits.bound("temperature")] | None = None
    top_p: Annotated[float, limits.bound("top_p")] | None = None
    top_k: Annotated[int, limits.bound("top_k")] | None = None
    min_p: Annotated[float, limits.bound("min_p")] | None = None
    repetition_penalty: Annotated[float, limits.bound("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, limits.bound("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, limits.bound("frequency_penalty")] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Annotated[float, limits.bound("logit_bias")]],
            Meta(max_length=limits.BIASES),
        ]
        | None
    ) = None
    seed: Annotated[int, limits.bound("seed")] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=limits.STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=limits.STOP_IDS)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    priority: Annotated[int, limits.bound("priority")] = 0
    deadline: Annotated[float, limits.bound("deadline")] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None


class CompletionRequest(Common, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, limits.bound("logprobs")] | None = None


class TextPart(Struct, forbid_unknown_fields=True, frozen=True):
    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Meta(max_length=limits.MESSAGES)]


class FunctionCall(Struct, forbid_unknown_fields=True, frozen=True):
    """`arguments` is JSON in a string, as OpenAI has it."""

    name: Name
    arguments: Text


class ToolCall(Struct, forbid_unknown_fields=True, frozen=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class SystemMessage(Struct, tag_field="role", tag="system", forbid_unknown_fields=True, frozen=True):
    content: Content
    name: Name | None = None


class DeveloperMessage(Struct, tag_field="role", tag="developer", forbid_unknown_fields=True, frozen=True):
    content: Content
    name: Name | None = None


class UserMessage(Struct, tag_field="role", tag="user", forbid_unknown_fields=True, frozen=True):
    content: Content
    name: Name | None = None


class AssistantMessage(Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True, frozen=True):
    content: Content | None = None
    name: Name | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=limits.TOOLS)] | None = None


class ToolMessage(Struct, tag_field="role", tag="tool", forbid_unknown_fields=True, frozen=True):
    content: Content
    tool_call_id: str
    name: Name | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(Struct, forbid_unknown_fields=True, frozen=True):
    """`parameters` is a JSON schema of the arguments."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True, frozen=True):
    function: Function
    type: Literal["function"] = "function"


class FunctionName(Struct, forbid_unknown_fields=True, frozen=True):
    name: Name


class NamedTool(Struct, forbid_unknown_fields=True, frozen=True):
    function: FunctionName
    type: Literal["function"] = "function"


class ChatRequest(Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=limits.MESSAGES)]
    max_completion_tokens: Annotated[int, limits.bound("max_completion_tokens")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, limits.bound("top_logprobs")] | None = None
    tools: Annotated[list[Tool], Meta(min_length=1, max_length=limits.TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[Name, str | Int64 | float | bool | None] | None = None
    reasoning_effort: str | None = None


class EmbeddingRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /v1/embeddings. `user` is accepted and changes nothing; priority, deadline and cache_salt are extensions."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, limits.bound("dimensions")] | None = None
    priority: Annotated[int, limits.bound("priority")] = 0
    deadline: Annotated[float, limits.bound("deadline")] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    user: str | None = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, frozen=True):
    """POST /tokenize: of a text, or of a conversation, which gets its special tokens from the model's template."""

    prompt: Text | UnsetType = UNSET
    messages: Annotated[list[Message], Meta(min_length=1, max_length=limits.MESSAGES)] | UnsetType = UNSET
    model: str | None = None
    add_special_tokens: bool = True
    tools: Annotated[list[Tool], Meta(min_length=1, max_length=limits.TOOLS)] | None = None
    chat_template_kwargs: dict[Name, str | Int64 | float | bool | None] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Struct, forbid_unknown_fields=True, frozen=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


T = TypeVar("T")


def decode(raw: bytes, kind: type[T]) -> T:
    """A body; 1.0 is an integer too, as JSON Schema has it. Raises what msgspec raises."""
    prepare = getattr(kind, "prepare", None)  # of what JSON Schema can say and msgspec cannot
    try:
        if prepare is not None:
            return msgspec.convert(prepare(msgspec.json.decode(raw)), kind)
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        value = _whole(msgspec.json.decode(raw))
        return msgspec.convert(value if prepare is None else prepare(value), kind)


# msgspec looks at annotations when a type is first used: now, rather than while somebody waits
for _kind in (CompletionRequest, ChatRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest):
    msgspec.json.Decoder(_kind)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(part) for name, part in value.items()}
    return [_whole(part) for part in value] if isinstance(value, list) else value


def prompts(prompt: str | list[Any], most: int = limits.PROMPTS) -> list[str] | list[list[int]]:
    """The prompts of a request; ValueError if they are no kind of PROMPT_SCHEMA, or INPUT_SCHEMA with `most` of it."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ValueError("an empty list")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [_tokens(prompt)]
    if len(prompt) > most:
        raise ValueError(f"{len(prompt)} prompts, at most {most}")
    if kinds == {str}:
        return prompt
    if kinds == {list}:
        return [_tokens(item) for item in prompt]
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")


def _tokens(items: object) -> list[int]:
    return msgspec.convert(items, Tokens)
