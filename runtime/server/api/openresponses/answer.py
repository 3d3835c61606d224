"""Makes a response of /v1/responses, or the events of its items, from the chunks of a chat answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...engine.engine_stream import EngineStream
from ...engine.messages import Delta
from ..answers import ChatAnswer
from ..errors import HttpError
from ..generate import AnswerWriter
from ..jobs import Job
from ..model import ServedModel
from ..requests import ChatRequest
from ..responses import CalledTool, ChatDelta, ContentLogprob
from .request import ResponsesRequest, TextOptions
from .resource import (
    Event,
    Incomplete,
    InputDetails,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningContent,
    Response,
    ResponseError,
    ResponseUsage,
    Status,
)

_INCOMPLETE = {"length": "max_output_tokens", "deadline": "deadline"}


class Growing:
    """An output item in progress. kind: "message", "reasoning" or "call"."""

    def __init__(self, kind: str, index: int, called: CalledTool | None = None) -> None:
        prefix = {"message": "msg", "reasoning": "rs", "call": "fc"}[kind]
        self.kind, self.index, self.id = kind, index, f"{prefix}_{uuid.uuid4().hex}"
        self.called = called
        self.text = ""
        self.logprobs: list[ContentLogprob] = []

    def item(self, status: Status) -> OutputItem:
        """The item in its current state; with status in_progress it has no text, which follows in events."""
        begun = status != "in_progress"
        if self.kind == "message":
            return OutputMessage(self.id, status, [self.part()] if begun else [])  # type: ignore[list-item]
        if self.kind == "reasoning":
            return OutputReasoning(self.id, status, [self.part()] if begun else [])  # type: ignore[list-item]
        assert self.called is not None
        name = self.called.function.name
        return OutputCall(self.id, status, self.called.id, name, self.text if begun else "")

    def part(self) -> OutputText | ReasoningContent:
        """The text so far, as a content part of the item."""
        if self.kind == "reasoning":
            return ReasoningContent(self.text)
        return OutputText(self.text, logprobs=list(self.logprobs))


class ResponsesAnswer(AnswerWriter):
    """Answers one request of /v1/responses. keep: called with the response once it has ended, whatever its status."""

    def __init__(
        self,
        model: ServedModel,
        request: ResponsesRequest,
        chat: ChatRequest,
        job: Job,
        stream: EngineStream,
        keep: Callable[[Response], None],
    ) -> None:
        self._chat = ChatAnswer(model, chat, job, stream)
        self._keep = keep
        self.response = _response(model, request)
        self._sequence = 0
        self._open: Growing | None = None
        self._reason = "stop"

    # -- AnswerWriter ------------------------------------------------------------------------------------------------

    def whole(self, deltas: Sequence[Delta]) -> Response:
        self.chunks(deltas)
        self.end()
        return self.response

    def begin(self) -> list[Event]:
        return [self._event(f"response.{what}", response=self._shown()) for what in ("created", "in_progress")]

    def chunks(self, deltas: Sequence[Delta]) -> list[Event]:
        events: list[Event] = []
        for chunk in self._chat.chunks(deltas):
            for choice in chunk.choices:
                logprobs = choice.logprobs.content if choice.logprobs is not None else []
                events += self._take(choice.delta, logprobs)
                self._reason = choice.finish_reason or self._reason
        return events

    def end(self) -> list[Event]:
        """The events that end the last item and the response. A response without output gets an empty message."""
        events = [] if self._open is not None or self.response.output else self._opened("message")
        cut = _INCOMPLETE.get(self._reason)
        if cut is not None:
            self.response.incomplete_details = Incomplete(cut)  # type: ignore[arg-type]
        status: Status = "completed" if cut is None else "incomplete"
        return [*events, *self._close(status), self._finish(status)]

    def failed(self, error: HttpError) -> list[Event]:
        """The last events of a stream that fails after it began."""
        events = self._close("incomplete")
        self.response.error = ResponseError(error.code or "server_error", error.message)
        return [*events, self._finish("failed")]

    # -- items -------------------------------------------------------------------------------------------------------

    def _take(self, delta: ChatDelta, logprobs: list[ContentLogprob]) -> list[Event]:
        events: list[Event] = []
        if thought := delta.reasoning_content:
            events += self._grow("reasoning", thought, "response.reasoning_text.delta")
        if delta.content:
            events += self._grow("message", delta.content, "response.output_text.delta", logprobs)
        for called in delta.tool_calls or ():
            events += self._take_call(called)
        return events

    def _grow(self, kind: str, text: str, event: str, logprobs: Sequence[ContentLogprob] = ()) -> list[Event]:
        events = self._opened(kind)
        assert self._open is not None
        self._open.text += text
        self._open.logprobs += logprobs
        more = {"logprobs": list(logprobs)} if kind == "message" else {}
        return [*events, self._at(event, self._open, content_index=0, delta=text, **more)]

    def _take_call(self, called: CalledTool) -> list[Event]:
        """The events of a new call, or of more arguments of the open call, which come without a name."""
        events = self._opened("call", called) if called.function.name else []
        assert self._open is not None
        piece = called.function.arguments
        if piece:
            self._open.text += piece
            events.append(self._at("response.function_call_arguments.delta", self._open, delta=piece))
        return events

    def _opened(self, kind: str, called: CalledTool | None = None) -> list[Event]:
        """Open an item of this kind, unless one is open; every call gets a new item. Returns the events."""
        if called is None and self._open is not None and self._open.kind == kind:
            return []
        events = self._close("completed")
        self._open = item = Growing(kind, len(self.response.output), called)
        shown = item.item("in_progress")
        events.append(self._event("response.output_item.added", output_index=item.index, item=shown))
        if kind != "call":
            events.append(self._at("response.content_part.added", item, content_index=0, part=item.part()))
        return events

    def _close(self, status: Status) -> list[Event]:
        """Close the open item, if there is one; returns the events."""
        item, self._open = self._open, None
        if item is None:
            return []
        events: list[Event] = []
        if item.called is not None:
            fields = {"name": item.called.function.name, "arguments": item.text}
            events.append(self._at("response.function_call_arguments.done", item, **fields))
        elif item.kind == "reasoning":
            events.append(self._at("response.reasoning_text.done", item, content_index=0, text=item.text))
        else:
            fields = {"content_index": 0, "text": item.text, "logprobs": list(item.logprobs)}
            events.append(self._at("response.output_text.done", item, **fields))
        if item.called is None:
            events.append(self._at("response.content_part.done", item, content_index=0, part=item.part()))
        shown = item.item(status)
        self.response.output = [*self.response.output, shown]
        return [*events, self._event("response.output_item.done", output_index=item.index, item=shown)]

    # -- events ------------------------------------------------------------------------------------------------------

    def _finish(self, status: Status) -> Event:
        usage = self._chat.tally.usage()
        details = usage.completion_tokens_details
        self.response.usage = ResponseUsage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.total_tokens,
            InputDetails(usage.prompt_tokens_details.cached_tokens),
            OutputDetails(details.reasoning_tokens if details else 0),
        )
        self.response.status = status
        self.response.completed_at = int(time.time()) if status == "completed" else None
        self._keep(self.response)
        return self._event(f"response.{status}", response=self._shown())

    def _at(self, kind: str, item: Growing, **fields: Any) -> Event:
        return self._event(kind, item_id=item.id, output_index=item.index, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = Event(kind, self._sequence, **fields)
        self._sequence += 1
        return event

    def _shown(self) -> Response:
        """A copy of the response in its current state."""
        return msgspec.structs.replace(self.response)


def _response(model: ServedModel, request: ResponsesRequest) -> Response:
    """The response before any output: the fields of the request."""
    text, defaults = request.text or TextOptions(), model.manifest.sampling.of_conversations()
    asked = request.reasoning
    return Response(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        model=request.model,
        status="in_progress",
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        tools=[msgspec.to_builtins(tool) for tool in request.tools or ()],
        tool_choice=msgspec.to_builtins(request.tool_choice) or "auto",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text={"format": msgspec.to_builtins(text.format) or {"type": "text"}, "verbosity": text.verbosity or "medium"},
        reasoning={"effort": asked.effort if asked else None, "summary": asked.summary if asked else None},
        temperature=_first(request.temperature, defaults.temperature, 0.0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        top_logprobs=request.top_logprobs or 0,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        truncation=request.truncation or "disabled",
        store=request.store is not False,
        service_tier=request.service_tier if request.service_tier not in (None, "auto") else "default",
        metadata=request.metadata or {},
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
    )


def _first(*values: float | None) -> float:
    """The first value that is not None."""
    return next(float(value) for value in values if value is not None)
