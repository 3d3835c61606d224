"""The answers of /v1/responses: the response, its items, and the events of a streamed response."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ..responses import ContentLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of the answer; `logprobs` of its tokens if they were requested."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class OutputMessage(Struct, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningContent(Struct, tag_field="type", tag="reasoning_text"):
    """The text of the model's thoughts."""

    text: str = ""


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    """The model's thoughts; there is never a summary."""

    id: str
    status: Status
    content: list[ReasoningContent]
    summary: list[Any] = []


class OutputCall(Struct, tag_field="type", tag="function_call"):
    """A call that the client is to make; `arguments` is JSON."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Struct):
    """How many of the prompt's tokens were in the prefix cache."""

    cached_tokens: int = 0


class OutputDetails(Struct):
    """How many of the answer's tokens are thoughts."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """Counts of tokens of the prompt and of the answer."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class Incomplete(Struct):
    """Why the answer is incomplete."""

    reason: Literal["max_output_tokens", "deadline"]


class ResponseError(Struct):
    """Why there is no answer."""

    code: str
    message: str


class Response(Struct, kw_only=True):
    """Answer of /v1/responses. The fields from `instructions` on are those of the request, or their defaults."""

    id: str
    created_at: int
    model: str
    status: Status
    object: Literal["response"] = "response"
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    previous_response_id: str | None
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    max_output_tokens: int | None
    max_tool_calls: int | None
    truncation: str
    store: bool
    background: bool = False
    service_tier: str = "default"
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None

    @property
    def output_text(self) -> str:
        """The text of the answer, without thoughts and calls."""
        said = [part.text for item in self.output if isinstance(item, OutputMessage) for part in item.content]
        return "".join(said)


class Event(Struct, omit_defaults=True):
    """One event of a streamed response; it has the fields of its type."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningContent | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET


class DeletedResponse(Struct):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItems(Struct):
    """The input of a stored response, the newest item first unless another order is requested."""

    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool = False
    object: Literal["list"] = "list"
