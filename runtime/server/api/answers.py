"""Makes OpenAI's answers from the engine's deltas: whole answers, and chunks of streamed ones."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from ...reading.parts import CallArguments, CallBegun, Part, Said, Thought
from ...requests.sampler import TokenLogprob
from ...requests.search import TOO_FEW
from ..engine.engine_stream import EngineFailed, EngineStream
from ..engine.messages import Delta, merge
from .errors import HttpError, conflict
from .generate import AnswerWriter
from .jobs import Job
from .logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from .model import ServedModel
from .requests import ChatRequest, CompletionRequest
from .responses import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    CompletionChoice,
    CompletionDetails,
    CompletionResponse,
    ErrorBody,
    PromptDetails,
    Usage,
)
from .transfers import transfer_of


class Tally:
    """Counts the tokens of a request as they come. `reasoning_tokens` is None if the answer is not searched for
    thoughts."""

    def __init__(self, job: Job) -> None:
        self.prompt_tokens, self._prices = job.prompt_tokens, job.prices
        self.output_tokens = self.cached_tokens = 0
        self.reasoning_tokens: int | None = 0 if job.thinks else None

    def add(self, delta: Delta) -> None:
        """Count the tokens of a delta, and those of its prompt that were in the prefix cache."""
        self.output_tokens += len(delta.token_ids)
        if delta.index == 0:
            self.cached_tokens += delta.cached or 0

    def usage(self) -> Usage:
        """The counts in the form of OpenAI's API."""
        total = self.prompt_tokens + self.output_tokens
        details = UNSET if self.reasoning_tokens is None else CompletionDetails(self.reasoning_tokens)
        found = Usage(self.prompt_tokens, self.output_tokens, total, PromptDetails(self.cached_tokens), details)
        if (prices := self._prices) is not None:
            found.cost = prices.cost(self.prompt_tokens, self.cached_tokens, self.output_tokens)
            found.saved = prices.saved(self.cached_tokens)
        return found


class CompletionAnswer(AnswerWriter):
    """Answers one completion request."""

    def __init__(self, model: ServedModel, request: CompletionRequest, job: Job, stream: EngineStream) -> None:
        self._model, self._request, self._job, self._stream = model, request, job, stream
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._offsets: dict[int, int] = {}
        self.tally = Tally(job)

    def whole(self, deltas: Sequence[Delta]) -> CompletionResponse:
        for delta in deltas:
            self.tally.add(delta)
        found = _chosen(by_choice(deltas), self._stream)
        choices = sorted(map(self._choice, found), key=lambda choice: choice.index)
        answer = CompletionResponse(self._id, self._created, self._request.model, choices, usage=self.tally.usage())
        answer.kv_transfer_params = transfer_of(self._stream)
        return answer

    def begin(self) -> list[CompletionResponse]:
        return []

    def chunks(self, deltas: Sequence[Delta]) -> list[CompletionResponse]:
        for delta in deltas:
            self.tally.add(delta)
        options = self._request.stream_options
        usage = self.tally.usage() if options and options.continuous_usage_stats else _no_usage(self._request)
        return [
            CompletionResponse(self._id, self._created, self._request.model, [self._choice(delta)], usage=usage)
            for delta in by_choice(deltas)
            if delta.text or delta.reason or delta.logprobs or delta.token_ids
        ]

    def end(self) -> list[CompletionResponse]:
        if not _wants_usage(self._request):
            return []
        return [CompletionResponse(self._id, self._created, self._request.model, [], usage=self.tally.usage())]

    def failed(self, error: HttpError) -> list[ErrorBody]:
        return [error.body()]

    def _choice(self, delta: Delta) -> CompletionChoice:
        position = delta.id - self._stream.first_id
        index = position * self._request.n + delta.index
        first = index not in self._offsets
        offset = self._offsets.setdefault(index, 0)
        text, logprobs, top = delta.text, None, self._request.logprobs
        if first and self._request.echo:
            text = self._job.prompt_texts[position] + text
        if top is not None:
            tokens: list[TokenLogprob | int] = list(delta.logprobs)
            if first and self._request.echo:
                scored = self._stream.prompt_logprobs.get(delta.id)
                tokens = [self._job.submits[position].prompt[0], *(scored.logprobs if scored else ()), *tokens]
            logprobs, self._offsets[index] = completion_logprobs(self._model, tokens, offset, top)
        choice = CompletionChoice(index, text, logprobs, delta.reason, score=_score(delta))
        if first and self._request.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._model, self._job, self._stream, position)
        return choice


class ChatAnswer(AnswerWriter):
    """Answers one chat request."""

    def __init__(self, model: ServedModel, request: ChatRequest, job: Job, stream: EngineStream) -> None:
        self._model, self._request, self._job, self._stream = model, request, job, stream
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._readers = [job.read() for _ in range(request.n)] if job.read is not None else None
        self.tally = Tally(job)

    def whole(self, deltas: Sequence[Delta]) -> ChatCompletion:
        for delta in deltas:
            self.tally.add(delta)
        choices = []
        for delta in _chosen(by_choice(deltas), self._stream):
            message = self._message(self._parts(delta))
            logprobs, reason = self._logprobs(delta), self._reason(delta)
            choices.append(ChatChoice(delta.index, message, logprobs, reason, _score(delta)))
        choices.sort(key=lambda choice: choice.index)
        answer = ChatCompletion(self._id, self._created, self._request.model, choices, self.tally.usage())
        answer.kv_transfer_params = transfer_of(self._stream)
        if self._request.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(self._model, self._job, self._stream, 0)
        return answer

    def begin(self) -> list[ChatChunk]:
        """A first chunk for each choice, with the role."""
        return [
            self._chunk(ChunkChoice(index, ChatDelta(role="assistant", content=""))) for index in range(self._request.n)
        ]

    def chunks(self, deltas: Sequence[Delta]) -> list[ChatChunk]:
        """Text goes into one chunk; the beginning of a tool call and each part of its arguments have chunks of their
        own."""
        read: dict[int, list[list[Part]]] = {}
        for delta in deltas:
            self.tally.add(delta)
            runs = read.setdefault(delta.index, [])
            for part in self._parts(delta):
                if runs and isinstance(part, Said | Thought) and isinstance(runs[-1][-1], Said | Thought):
                    runs[-1].append(part)
                else:
                    runs.append([part])
        chunks = []
        for delta in by_choice(deltas):
            *before, last = read[delta.index] or [[]]
            reason = self._reason(delta)
            chunks += [self._chunk(ChunkChoice(delta.index, self._delta(parts))) for parts in before]
            if last or reason or delta.logprobs or not self._readers:
                said = self._delta(last)
                choice = ChunkChoice(delta.index, said, self._logprobs(delta), reason, _score(delta))
                chunks.append(self._chunk(choice))
        return chunks

    def end(self) -> list[ChatChunk]:
        if not _wants_usage(self._request):
            return []
        return [ChatChunk(self._id, self._created, self._request.model, [], usage=self.tally.usage())]

    def failed(self, error: HttpError) -> list[ErrorBody]:
        return [error.body()]

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        options = self._request.stream_options
        usage = self.tally.usage() if options and options.continuous_usage_stats else _no_usage(self._request)
        return ChatChunk(self._id, self._created, self._request.model, [choice], usage=usage)

    # -- contents ----------------------------------------------------------------------------------------------------

    def _parts(self, delta: Delta) -> list[Part]:
        """The text, thoughts and tool calls in a delta."""
        if self._readers is None:
            return [Said(delta.text)] if delta.text else []
        reader = self._readers[delta.index]
        thinking = reader.thinking
        parts: list[Part] = reader.push(delta.text)
        if self.tally.reasoning_tokens is not None and (thinking or reader.thinking):
            self.tally.reasoning_tokens += len(delta.token_ids)
        if delta.reason is not None:
            parts += reader.finish()
        return [part for part in parts if self._request.include_reasoning or not isinstance(part, Thought)]

    def _reason(self, delta: Delta) -> str | None:
        """The finish reason: the tool calls of the answer, or the engine's reason; None if the answer has not ended."""
        reader = None if self._readers is None else self._readers[delta.index]
        if delta.reason is None or reader is None or not reader.calls or (delta.reason != "stop" and not reader.full):
            return delta.reason
        return "function_call" if self._job.offer.legacy else "tool_calls"

    def _message(self, parts: Sequence[Part]) -> ChatMessage:
        text, thought, calls = _text(parts, Said), _text(parts, Thought), _calls(parts)
        message = ChatMessage(text or ("" if not calls else None), reasoning_content=thought or UNSET)
        if calls and self._job.offer.legacy:
            message.function_call = calls[0].function
        elif calls:
            message.tool_calls = calls
        return message

    def _delta(self, parts: Sequence[Part]) -> ChatDelta:
        text, thought, calls = _text(parts, Said), _text(parts, Thought), _calls(parts, pieces=True)
        delta = ChatDelta(content=UNSET if (thought or calls) and not text else text)
        delta.reasoning_content = thought or UNSET
        if calls and self._job.offer.legacy:
            delta.function_call = calls[0].function
        elif calls:
            delta.tool_calls = calls
        return delta

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not (self._request.logprobs or self._request.top_logprobs):
            return None
        return chat_logprobs(self._model, delta.logprobs)


def _text(parts: Sequence[Part], kind: type[Said | Thought]) -> str:
    return "".join([part.text for part in parts if isinstance(part, kind)])  # type: ignore[union-attr]


def _calls(parts: Sequence[Part], pieces: bool = False) -> list[CalledTool]:
    """The tool calls among the parts. pieces: also calls that began earlier and got more arguments."""
    calls: dict[int, CalledTool] = {}
    for part in parts:
        if isinstance(part, CallBegun):
            index: int | UnsetType = part.index if pieces else UNSET
            calls[part.index] = CalledTool(CalledFunction("", part.name), part.id, index, "function")
        elif isinstance(part, CallArguments):
            call = calls.setdefault(part.index, CalledTool(CalledFunction(""), index=part.index))
            call.function.arguments += part.text
    return list(calls.values())


def _chosen(deltas: Sequence[Delta], stream: EngineStream) -> list[Delta]:
    """The deltas of the completions to return. If `best_of` chose among them, these are numbered anew from 0."""
    found = []
    for delta in deltas:
        chosen = stream.chosen.get(delta.id)
        if chosen is None:
            found.append(delta)
        elif delta.index in chosen:
            found.append(msgspec.structs.replace(delta, index=chosen.index(delta.index)))
    return found


def _score(delta: Delta) -> float | UnsetType:
    return UNSET if delta.score is None else delta.score


def by_choice(deltas: Sequence[Delta]) -> list[Delta]:
    """One delta per completion, merged. EngineFailed if one ended because the model failed, HttpError 400 if beam
    search found fewer texts than the request wants."""
    grouped: dict[tuple[int, int], list[Delta]] = {}
    for delta in deltas:
        grouped.setdefault((delta.id, delta.index), []).append(delta)
        if delta.reason == "error":
            raise EngineFailed(
                500, "the model failed on this request: its logits are not numbers, or its grammar ends here"
            )
        if delta.reason == TOO_FEW:
            raise conflict("beam search found fewer texts than n asks for: no others are allowed", "n")
    return [merge(group) for group in grouped.values()]


def _no_usage(request: CompletionRequest | ChatRequest):
    """The `usage` of chunks without counts: null if the last chunk has them, else absent."""
    return None if _wants_usage(request) else UNSET


def _wants_usage(request: CompletionRequest | ChatRequest) -> bool:
    return bool(request.stream_options is not None and request.stream_options.include_usage)
