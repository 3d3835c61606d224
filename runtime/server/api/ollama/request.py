"""The bodies of Ollama's API. A field that this server cannot honour is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from .. import limits
from ..conversation import Speaker, Tool
from ..fields import Stop, Text

_DURATION = r"^[+-]?(0|((\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h))+)$"  # Go's
Seconds = Annotated[float, Meta(ge=-9.2e9, le=9.2e9)]  # a duration in Go holds at most 292 years
KeepAlive = Seconds | Annotated[str, Meta(max_length=64, pattern=_DURATION)]
Images = Annotated[list[str], Meta(extra_json_schema={"maxItems": 0})]  # refused with an explanation, see `convert`
Never = Annotated[bool, Meta(extra_json_schema={"enum": [False]})]
Nothing = Annotated[str, Meta(extra_json_schema={"maxLength": 0})]
Count = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


class OllamaOptions(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """How an answer is sampled. num_predict: most tokens; 0 or less: as many as the context allows. num_ctx: tokens of
    context that the engine must have. repeat_last_n: 0 disables repeat_penalty, which otherwise acts on all tokens, as
    with -1. The fields from num_keep on are options of loading a model; they are accepted and ignored."""

    num_predict: Annotated[int, limits.bound("num_predict")] | None = None
    num_ctx: Annotated[int, limits.bound("num_ctx")] | None = None
    temperature: Annotated[float, limits.bound("temperature")] | None = None
    top_k: Annotated[int, limits.bound("top_k")] | None = None
    top_p: Annotated[float, limits.bound("top_p")] | None = None
    min_p: Annotated[float, limits.bound("min_p")] | None = None
    typical_p: Literal[1] | None = None
    mirostat: Literal[0] | None = None
    seed: Annotated[int, limits.bound("seed")] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=limits.STOPS)] | None = None
    repeat_penalty: Annotated[float, limits.bound("repetition_penalty")] | None = None
    repeat_last_n: Annotated[int, limits.bound("repeat_last_n")] | None = None
    presence_penalty: Annotated[float, limits.bound("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, limits.bound("frequency_penalty")] | None = None
    num_keep: Count | None = None
    num_batch: Count | None = None
    num_gpu: Count | None = None
    main_gpu: Count | None = None
    num_thread: Count | None = None
    low_vram: bool | None = None
    numa: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None


class OllamaRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Fields that all bodies share. keep_alive: a duration, accepted and ignored: the engine stays loaded."""

    model: str = ""
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaAsking(OllamaRequest, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Fields that chats and prompts share. stream: unless it is false, an answer is a stream of lines. think: whether
    the model thinks, or how much. truncate, shift: must not be true: a prompt that is too long is refused, and an
    answer ends at the end of the context."""

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, limits.bound("top_logprobs")] | None = None
    truncate: Never | None = None
    shift: Never | None = None


class OllamaFunction(Struct, frozen=True):
    """A function and its arguments."""

    name: Speaker
    arguments: dict[str, Any] | None = None


class OllamaCall(Struct, frozen=True):
    """A call in an earlier answer."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(Struct, frozen=True):
    """A message. tool_name, tool_call_id: of a tool's result; a result without an id belongs to the first call of that
    name without a result."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=limits.TOOLS)] | None = None
    tool_name: Speaker | None = None
    tool_call_id: Speaker | None = None


class OllamaChatRequest(OllamaAsking, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /api/chat. Without messages it only asks whether the model is loaded."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=limits.MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=limits.TOOLS)] | None = None


class OllamaGenerateRequest(OllamaAsking, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /api/generate. raw: the prompt is completed without the chat template, else it is a user message. suffix:
    the text after the answer, for models that fill in the middle. Without a prompt it only asks whether the model is
    loaded."""

    prompt: Text | None = None
    suffix: Text | None = None
    system: Text | None = None
    raw: bool | None = None
    images: Images | None = None
    template: Nothing | None = None
    context: Annotated[list[int], Meta(extra_json_schema={"maxItems": 0})] | None = None


class OllamaEmbedRequest(OllamaRequest, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /api/embed. truncate: unless it is false, a text that is too long is cut at its end."""

    input: Text | Annotated[list[Text], Meta(max_length=limits.INPUTS)] = ""
    truncate: bool | None = None
    dimensions: Annotated[int, limits.bound("dimensions")] | None = None


class OllamaEmbeddingsRequest(OllamaRequest, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /api/embeddings: the older form, for one text."""

    prompt: Text = ""


class OllamaShowRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /api/show. name: an older name of model. verbose is accepted and ignored."""

    model: str = ""
    name: str | None = None
    verbose: bool | None = None
