"""The response bodies of the API; the OpenAPI document is made from them too."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from .requests import KVTransferParams


class Error(Struct):
    """An error as in OpenAI's API: `type` is its class, `param` the field of the request, `code` a fixed word for the
    cause."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct):
    """The body of every error."""

    error: Error


class PromptDetails(Struct):
    """How many of the prompt's tokens were in the prefix cache."""

    cached_tokens: int = 0


class CompletionDetails(Struct):
    """How many of the answer's tokens are thoughts."""

    reasoning_tokens: int = 0


class Usage(Struct):
    """Counts of tokens of the prompt and of the answer. cost: by the server's prices, if it has any; saved: how much
    more it would have been without the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    cost: float | UnsetType = UNSET
    saved: float | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """One entry per token; those of the first token of an echoed prompt are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """As in vLLM: `rank` 1 is the likeliest token; null if the token is not among the requested likeliest ones."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(Struct):
    """prompt_logprobs: for each token of the prompt, that token and the likeliest ones, by id; null for the first.
    score: of a completion of beam search."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    score: float | UnsetType = UNSET


class CompletionResponse(Struct):
    """Answer, and chunk of a streamed answer, of /v1/completions."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class TopLogprob(Struct):
    """One of the likeliest tokens; `bytes` are its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ContentLogprob(Struct):
    """A token of the answer, and the likeliest tokens at its position."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """The tokens of an answer."""

    content: list[ContentLogprob]
    refusal: None = None


class CalledFunction(Struct, omit_defaults=True):
    """`arguments` is JSON; in a stream, a part of it, and `name` comes with the first part."""

    arguments: str
    name: str = ""


class CalledTool(Struct, omit_defaults=True):
    """A tool call; in a stream `index` counts the calls, and only the first part of a call has an id and a type."""

    function: CalledFunction
    id: str = ""
    index: int | UnsetType = UNSET
    type: str = ""


class ChatMessage(Struct):
    """`reasoning_content` is what the model thought before the answer. `function_call` is for requests with that older
    field."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatChoice(Struct):
    """One of the answers. score: of an answer of beam search."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    score: float | UnsetType = UNSET


class ChatCompletion(Struct):
    """Answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class ChatDelta(Struct):
    """The addition to an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChunkChoice(Struct):
    """The addition to one of the answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    score: float | UnsetType = UNSET


class ChatChunk(Struct):
    """One event of a streamed answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET


class EmbeddingUsage(Struct):
    """Counts of tokens of the inputs."""

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
    """A document."""

    text: str


class RankedDocument(Struct):
    """`index` is the document's index in the request."""

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
    """The served model, or an adapter of it. created: in seconds since 1970; created_at: the same in RFC 3339's format;
    max_model_len, max_input_tokens: the most tokens of a prompt and its answer together. parent: of an adapter, its
    model; root: where it is stored. The fields after root are Anthropic's."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "icc"
    parent: str | None = None
    root: str | None = None
    display_name: str = ""
    created_at: str = ""
    max_input_tokens: int = 0
    lifecycle: Literal["active"] = "active"
    type: Literal["model"] = "model"

    def __post_init__(self) -> None:
        self.display_name, self.max_input_tokens = self.id, self.max_model_len
        self.created_at = datetime.fromtimestamp(self.created, UTC).isoformat().replace("+00:00", "Z")


class AdapterEntry(Struct):
    """An adapter as in the list of llama.cpp's server, with its name. scale: in requests that name no adapter."""

    id: int
    path: str
    name: str
    scale: float


class ModelList(Struct):
    """Answer of /v1/models, all in one page; the last three fields are Anthropic's."""

    data: list[Model]
    object: Literal["list"] = "list"
    has_more: Literal[False] = False
    first_id: str = ""
    last_id: str = ""

    def __post_init__(self) -> None:
        self.first_id, self.last_id = self.data[0].id, self.data[-1].id


class Tokenized(Struct):
    """`token_strs` are the tokens' texts, if they are requested."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class RenderedSampling(Struct):
    """The sampling parameters of a rendered request, under vLLM's names."""

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int | None
    skip_special_tokens: bool


class Rendered(Struct):
    """A prompt as the engine would get it: the GenerateRequest of vLLM's /render, from which routers get token ids."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: RenderedSampling
    stream: bool
    priority: int
    cache_salt: str | None = None


class Detokenized(Struct):
    """Answer of /detokenize."""

    prompt: str


class Status(Struct):
    """Answer of /live and /ready."""

    status: str


class Version(Struct):
    """Answer of /version."""

    version: str
    model: str
    target: str
    quantization: str
