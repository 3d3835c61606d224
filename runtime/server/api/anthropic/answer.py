"""Makes Anthropic's message, or the events of its blocks, from the chunks of a chat answer."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ...engine.engine_stream import EngineStream
from ...engine.messages import Delta
from ..answers import ChatAnswer
from ..errors import HttpError
from ..generate import AnswerWriter
from ..jobs import Job
from ..model import ServedModel
from ..requests import ChatRequest
from ..responses import CalledTool, ChatDelta

_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnswerBlock(Struct, omit_defaults=True):
    """A block of a message: text, thinking or tool_use; it has the fields of its type."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: Any = UNSET


class MessageUsage(Struct):
    """`input_tokens`: tokens that were neither found in the prefix cache nor added to it by cache_control. cost, saved:
    see Usage."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cost: float | UnsetType = UNSET
    saved: float | UnsetType = UNSET


class Message(Struct):
    """Answer of /v1/messages."""

    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class BlockDelta(Struct, omit_defaults=True):
    """An addition to a block; it has the fields of its type."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class MessageEnd(Struct):
    """Why the message ended; stop_sequence: the text that ended it, if one did."""

    stop_reason: str | None
    stop_sequence: str | None


class ErrorDetails(Struct):
    """The error's code, as in the OpenAI API."""

    error_code: str


class AnthropicError(Struct):
    """`details` has the error's code, if it has one."""

    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class AnthropicErrorBody(Struct):
    """An error, as an answer and as an event."""

    error: AnthropicError
    request_id: str | None = None
    type: Literal["error"] = "error"


class MessageEvent(Struct, omit_defaults=True):
    """One event of a streamed message; it has the fields of its type."""

    type: str
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: AnswerBlock | UnsetType = UNSET
    delta: BlockDelta | MessageEnd | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class TokenCount(Struct):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


def error_body(error: HttpError, request_id: str | None = None) -> AnthropicErrorBody:
    """An error in the form of Anthropic's API. request_id: of the request, None if unknown."""
    details = ErrorDetails(error.code) if error.code else UNSET
    found = AnthropicError(_ERRORS.get(error.status, "api_error"), error.message, details)
    return AnthropicErrorBody(found, request_id)


class MessagesAnswer(AnswerWriter):
    """Answers one request of /v1/messages."""

    def __init__(self, model: ServedModel, chat: ChatRequest, job: Job, stream: EngineStream) -> None:
        self._chat = ChatAnswer(model, chat, job, stream)
        self.message = Message(f"msg_{uuid.uuid4().hex}", chat.model, [], MessageUsage(0, 0))
        self._begun, self._kept = False, job.kept
        self._open: Literal["text", "thinking", "tool_use"] | None = None
        self._text = ""  # text of the open block; for tool_use, the input as JSON
        self._call: CalledTool | None = None
        self._reason = "stop"

    def whole(self, deltas: Sequence[Delta]) -> Message:
        self.chunks(deltas)
        self.end()
        return self.message

    def begin(self) -> list[MessageEvent]:
        return []  # the first event tells the cached tokens of the prompt, which come with the first delta

    def chunks(self, deltas: Sequence[Delta]) -> list[MessageEvent]:
        chunks = self._chat.chunks(deltas)
        events = [] if self._begun else self._start()
        for delta in deltas:
            self.message.stop_sequence = delta.stop or self.message.stop_sequence
        for chunk in chunks:
            for choice in chunk.choices:
                events += self._take(choice.delta)
                self._reason = choice.finish_reason or self._reason
        return events

    def end(self) -> list[MessageEvent]:
        events = self._close()
        message = self.message
        message.stop_reason = _STOP_REASONS.get(self._reason, "end_turn")
        if message.stop_sequence is not None and message.stop_reason == "end_turn":
            message.stop_reason = "stop_sequence"
        message.usage = self._usage()
        last = MessageEnd(message.stop_reason, message.stop_sequence)
        return [*events, MessageEvent("message_delta", delta=last, usage=message.usage), MessageEvent("message_stop")]

    def failed(self, error: HttpError) -> list[AnthropicErrorBody]:
        return [error_body(error)]

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _start(self) -> list[MessageEvent]:
        self._begun = True
        self.message.usage = msgspec.structs.replace(self._usage(), output_tokens=0)
        shown = msgspec.structs.replace(self.message, content=[])
        return [MessageEvent("message_start", message=shown), MessageEvent("ping")]

    def _take(self, delta: ChatDelta) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        if thought := delta.reasoning_content:
            events += self._grow("thinking", BlockDelta("thinking_delta", thinking=thought), thought)
        if delta.content:
            events += self._grow("text", BlockDelta("text_delta", text=delta.content), delta.content)
        for called in delta.tool_calls or ():
            if called.function.name:  # a part without a name continues the open call
                events += self._opened("tool_use", called)
            if piece := called.function.arguments:
                events += self._grow("tool_use", BlockDelta("input_json_delta", partial_json=piece), piece)
        return events

    def _grow(self, kind: Literal["text", "thinking", "tool_use"], delta: BlockDelta, text: str) -> list[MessageEvent]:
        events = self._opened(kind)
        self._text += text
        return [*events, MessageEvent("content_block_delta", index=len(self.message.content), delta=delta)]

    def _opened(
        self, kind: Literal["text", "thinking", "tool_use"], call: CalledTool | None = None
    ) -> list[MessageEvent]:
        """Open a block of this kind, unless one is open; every call gets a new block. Returns the events."""
        if call is None and self._open == kind:
            return []
        events = self._close()
        self._open, self._call, self._text = kind, call, ""
        event = MessageEvent("content_block_start", index=len(self.message.content), content_block=self._block({}))
        return [*events, event]

    def _close(self) -> list[MessageEvent]:
        """Close the open block, if there is one; returns the events."""
        if self._open is None:
            return []
        index = len(self.message.content)
        self.message.content = [*self.message.content, self._block(_value(self._text))]
        self._open = None
        return [MessageEvent("content_block_stop", index=index)]

    def _block(self, arguments: Any) -> AnswerBlock:
        """The open block in its current state."""
        if self._open == "thinking":
            return AnswerBlock("thinking", thinking=self._text, signature="")
        if self._open == "text":
            return AnswerBlock("text", text=self._text)
        assert self._call is not None
        return AnswerBlock("tool_use", id=self._call.id, name=self._call.function.name, input=arguments)

    def _usage(self) -> MessageUsage:
        usage = self._chat.tally.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        made = max(self._kept - cached, 0)
        return MessageUsage(
            usage.prompt_tokens - cached - made, usage.completion_tokens, cached, made, usage.cost, usage.saved
        )


def _value(text: str) -> dict[str, Any]:
    """A call's arguments; {} if the call was cut off."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
