"""The response bodies of the API; the OpenAPI document is made from them too."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class Error(Struct):
    """As OpenAI has it: `type` is the class of the error, `param` the field of the request, `code` a fixed word."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct):
    error: Error


class PromptDetails(Struct):
    """Of the prompt's tokens, those whose KV was in the prefix cache."""

    cached_tokens: int = 0


class CompletionDetails(Struct):
    """Of the answer's tokens, those of thoughts."""

    reasoning_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """One entry per token; those of the first token of an echoed prompt are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """vLLM's: `rank` 1 is the likeliest token; null where it was not among those that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(Struct):
    """prompt_logprobs: for each of the prompt's tokens, by id, that token and the likeliest; null for the first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class CompletionResponse(Struct):
    """Answer, and chunk of a streamed answer, of /v1/completions."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ContentLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ContentLogprob]
    refusal: None = None


class CalledFunction(Struct, omit_defaults=True):
    """`arguments` is JSON; in a stream, a piece of it, and `name` comes with the first."""

    arguments: str
    name: str = ""


class CalledTool(Struct, omit_defaults=True):
    """A call; in a stream `index` counts them, and only the first piece of a call has an id and a type."""

    function: CalledFunction
    id: str = ""
    index: int | UnsetType = UNSET
    type: str = ""


class ChatMessage(Struct):
    """`reasoning_content` is what the model thought before. `function_call` is for clients that asked by that name."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(Struct):
    """Answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Struct):
    """One event of a streamed answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Vector(Struct):
    """`embedding` is a list of numbers, or base64 of their float32 in little-endian order."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct):
    """Answer of /v1/embeddings."""

    data: list[Vector]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class RankedText(Struct):
    text: str


class RankedDocument(Struct):
    """`index` is the document's place in the request."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Reranked(Struct):
    """Answer of /v1/rerank: the best documents first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedDocument]


class Model(Struct):
    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "icc"


class ModelList(Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class Tokenized(Struct):
    """`token_strs` are the tokens' texts, if they are asked for."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct):
    prompt: str


class Status(Struct):
    """Answer of /live and /ready."""

    status: str


class Version(Struct):
    version: str
    model: str
    target: str
    quantization: str
