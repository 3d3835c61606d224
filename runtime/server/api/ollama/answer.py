"""Makes answers of Ollama's API from the engine's deltas: a stream of lines, or a single one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ...engine.engine_stream import EngineStream
from ...engine.messages import Delta
from ..answers import ChatAnswer, CompletionAnswer
from ..errors import HttpError
from ..generate import AnswerWriter
from ..jobs import Job
from ..logprobs import chat_logprobs
from ..model import ServedModel
from ..requests import ChatRequest, CompletionRequest
from ..responses import CalledTool, ChatDelta, ChunkChoice, ContentLogprob

_REASONS = {"tool_calls": "stop"}


class OllamaErrorBody(Struct, omit_defaults=True):
    """An error, as an answer and as a line. `code` is a fixed word, `param` the field of the request."""

    error: str
    code: str | None = None
    param: str | None = None


class OllamaCalledFunction(Struct):
    """`index` counts the calls of an answer."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCalled(Struct):
    """A call."""

    id: str
    function: OllamaCalledFunction


class OllamaSaid(Struct, omit_defaults=True):
    """The text, thoughts and calls of an answer: all, or the new ones."""

    content: str
    role: Literal["assistant"] | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCalled] | UnsetType = UNSET


class OllamaLine(Struct, omit_defaults=True, kw_only=True):
    """Fields that answers of chats and prompts share. The counts, and the durations in nanoseconds, come with the last
    line."""

    model: str
    created_at: str
    done: bool | UnsetType = UNSET
    done_reason: str | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatLine(OllamaLine, omit_defaults=True, kw_only=True):
    """Answer, and line of a streamed answer, of /api/chat."""

    message: OllamaSaid


class OllamaGenerateLine(OllamaLine, omit_defaults=True, kw_only=True):
    """Answer, and line of a streamed answer, of /api/generate."""

    response: str
    thinking: str | UnsetType = UNSET


Shape = type[OllamaChatLine] | type[OllamaGenerateLine]


def now() -> str:
    """The time in the form of Ollama's API."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def loaded(shape: Shape, model: str) -> OllamaLine:
    """The answer of a request without a prompt, which only asks whether the model is loaded."""
    return _line(shape, model, OllamaSaid(""), done=True, done_reason="load")


def _line(shape: Shape, model: str, said: OllamaSaid, **fields: Any) -> OllamaLine:
    fields.setdefault("done", False)
    if shape is OllamaChatLine:
        said.role = "assistant"
        return OllamaChatLine(model=model, created_at=now(), message=said, **fields)
    return OllamaGenerateLine(model=model, created_at=now(), response=said.content, thinking=said.thinking, **fields)


class OllamaAnswer(AnswerWriter):
    """Answers one request of /api/chat or /api/generate; `shape` is the type of its lines."""

    def __init__(
        self,
        model: ServedModel,
        request: ChatRequest | CompletionRequest,
        job: Job,
        shape: Shape,
        stream: EngineStream,
    ) -> None:
        self._model, self._request, self._job, self._shape, self._stream = model, request, job, shape, stream
        if isinstance(request, ChatRequest):
            self._inner = ChatAnswer(model, request, job, stream)
        else:
            self._inner = CompletionAnswer(model, request, job, stream)
        self._call: CalledTool | None = None  # the call whose arguments are incomplete
        self._called = 0
        self._reason = "stop"
        self._queued_s = 0.0
        self._logprobs: list[ContentLogprob] = []  # not sent in a line yet

    def whole(self, deltas: Sequence[Delta]) -> OllamaLine:
        said = [*self._said(deltas), *self._ended_call()]
        text, thought = "".join(one.content for one in said), "".join(one.thinking or "" for one in said)
        calls = [call for one in said for call in one.tool_calls or ()]
        return self._last(OllamaSaid(text, thinking=thought or UNSET, tool_calls=calls or UNSET))

    def begin(self) -> Sequence[Struct]:
        return []

    def chunks(self, deltas: Sequence[Delta]) -> list[OllamaLine]:
        return [self._told(said) for said in self._said(deltas)]

    def end(self) -> list[OllamaLine]:
        return [*(self._told(said) for said in self._ended_call()), self._last(OllamaSaid(""))]

    def failed(self, error: HttpError) -> list[OllamaErrorBody]:
        return [OllamaErrorBody(error.message, error.code, error.param)]

    # -- contents ----------------------------------------------------------------------------------------------------

    def _said(self, deltas: Sequence[Delta]) -> Iterator[OllamaSaid]:
        """The contents of the deltas; a call comes when it is complete."""
        for delta in deltas:
            self._queued_s = delta.queued_s or self._queued_s
            if self._request.logprobs is not None and self._request.logprobs is not False:
                self._logprobs += chat_logprobs(self._model, delta.logprobs).content
        for chunk in self._inner.chunks(deltas):
            for choice in chunk.choices:
                self._reason = choice.finish_reason or self._reason
                grown = choice.delta if isinstance(choice, ChunkChoice) else ChatDelta(content=choice.text)
                if grown.content or grown.reasoning_content:
                    yield OllamaSaid(grown.content or "", thinking=grown.reasoning_content or UNSET)
                for called in grown.tool_calls or ():
                    yield from self._grown(called)

    def _grown(self, called: CalledTool) -> Iterator[OllamaSaid]:
        if called.function.name:  # a part without a name continues the open call
            yield from self._ended_call()
            self._call = called
        elif self._call is not None:
            self._call.function.arguments += called.function.arguments

    def _ended_call(self) -> Iterator[OllamaSaid]:
        if self._call is None:
            return
        try:
            arguments = msgspec.json.decode(self._call.function.arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):  # a call that was cut off has none
            arguments = {}
        function = OllamaCalledFunction(self._called, self._call.function.name, arguments)
        yield OllamaSaid("", tool_calls=[OllamaCalled(self._call.id, function)])
        self._call, self._called = None, self._called + 1

    def _told(self, said: OllamaSaid) -> OllamaLine:
        """A line, with the log-probabilities that were not sent yet."""
        told, self._logprobs = self._logprobs, []
        return _line(self._shape, self._request.model, said, logprobs=told or UNSET)

    def _last(self, said: OllamaSaid) -> OllamaLine:
        line, tally, stream = self._told(said), self._inner.tally, self._stream
        line.done, line.done_reason = True, _REASONS.get(self._reason, self._reason)
        ended = time.monotonic_ns()
        first = ended if stream.first_ns is None else stream.first_ns
        line.total_duration, line.load_duration = ended - stream.sent_ns, 0
        line.prompt_eval_count, line.eval_count = tally.prompt_tokens, tally.output_tokens
        line.prompt_eval_duration = max(first - stream.sent_ns - int(self._queued_s * 1e9), 1)
        line.eval_duration = max(ended - first, 1)
        return line
