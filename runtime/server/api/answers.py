"""From the engine's deltas to answers: whole ones, and chunks of streamed ones."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence

from msgspec import UNSET

from ...requests.sampler import TokenLogprob
from ..engine.engine_client import EngineFailed, Stream
from ..engine.messages import Delta, merge
from .errors import HttpError
from .jobs import Job
from .model import ServedModel
from .requests import ChatRequest, CompletionRequest
from .responses import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ContentLogprob,
    ErrorBody,
    PromptDetails,
    TopLogprob,
    Usage,
)
from .tools import ToolReader


class Tally:
    """Counts the tokens of a request as they come."""

    def __init__(self, job: Job) -> None:
        self.prompt_tokens = job.prompt_tokens
        self.output_tokens = self.cached_tokens = 0

    def add(self, delta: Delta) -> None:
        self.output_tokens += len(delta.token_ids)
        if delta.index == 0:
            self.cached_tokens += delta.cached or 0

    def usage(self) -> Usage:
        total = self.prompt_tokens + self.output_tokens
        return Usage(self.prompt_tokens, self.output_tokens, total, PromptDetails(self.cached_tokens))


class CompletionAnswer:
    """Answers one completion request."""

    def __init__(self, model: ServedModel, request: CompletionRequest, job: Job, stream: Stream) -> None:
        self._model, self._request, self._job, self._stream = model, request, job, stream
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._offsets: dict[int, int] = {}
        self.tally = Tally(job)

    def whole(self, deltas: Sequence[Delta]) -> Completion:
        choices = [self._choice(delta) for delta in _by_choice(deltas)]
        for delta in deltas:
            self.tally.add(delta)
        choices.sort(key=lambda choice: choice.index)
        return Completion(self._id, self._created, self._request.model, choices, usage=self.tally.usage())

    def begin(self) -> list[Completion]:
        return []

    def chunks(self, deltas: Sequence[Delta]) -> list[Completion]:
        for delta in deltas:
            self.tally.add(delta)
        options = self._request.stream_options
        usage = self.tally.usage() if options and options.continuous_usage_stats else _no_usage(self._request)
        return [
            Completion(self._id, self._created, self._request.model, [self._choice(delta)], usage=usage)
            for delta in _by_choice(deltas)
            if delta.text or delta.reason or delta.logprobs or delta.token_ids
        ]

    def end(self) -> list[Completion]:
        if not _wants_usage(self._request):
            return []
        return [Completion(self._id, self._created, self._request.model, [], usage=self.tally.usage())]

    def failed(self, error: HttpError) -> list[ErrorBody]:
        return [error.body()]

    def _choice(self, delta: Delta) -> CompletionChoice:
        position = delta.id - self._stream.first_id
        index = position * self._request.n + delta.index
        first = index not in self._offsets
        offset = self._offsets.setdefault(index, 0)
        text, logprobs = delta.text, None
        if first and self._request.echo:
            text = self._job.prompt_texts[position] + text
        if self._request.logprobs is not None:
            tokens: list[TokenLogprob | int] = list(delta.logprobs)
            if first and self._request.echo:
                scored = self._stream.prompt_logprobs.get(delta.id)
                tokens = [self._job.submits[position].prompt[0], *(scored.logprobs if scored else ()), *tokens]
            logprobs = self._logprobs(tokens, offset)
            self._offsets[index] = offset + sum(len(token) for token in logprobs.tokens)
        return CompletionChoice(index, text, logprobs, delta.reason)

    def _logprobs(self, entries: Iterable[TokenLogprob | int], offset: int) -> CompletionLogprobs:
        """A bare token id is the first token of a prompt, which nothing predicts."""
        result = CompletionLogprobs([], [], [], [])
        for entry in entries:
            known = isinstance(entry, TokenLogprob)
            text = self._model.token_text(entry.token_id if known else entry)
            result.tokens.append(text)
            result.token_logprobs.append(entry.logprob if known else None)
            top = {self._model.token_text(token): value for token, value in reversed(entry.top)} if known else None
            result.top_logprobs.append(top)
            result.text_offset.append(offset)
            offset += len(text)
        return result


class ChatAnswer:
    """Answers one chat request."""

    def __init__(self, model: ServedModel, request: ChatRequest, job: Job, stream: Stream) -> None:
        self._model, self._request = model, request
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        names = [tool.function.name for tool in request.tools or ()]
        self._readers = [ToolReader(job.tool_format, names) for _ in range(request.n)] if job.tool_format else None
        self.tally = Tally(job)

    def whole(self, deltas: Sequence[Delta]) -> ChatCompletion:
        choices = []
        for delta in deltas:
            self.tally.add(delta)
        for delta in _by_choice(deltas):
            said, reason = self._read(delta)
            text = said.content if said.content is not UNSET else None
            message = ChatMessage(text if text or said.tool_calls is UNSET else None, tool_calls=said.tool_calls)
            if message.content is None and said.tool_calls is UNSET:
                message.content = ""
            choices.append(ChatChoice(delta.index, message, self._logprobs(delta), reason))
        choices.sort(key=lambda choice: choice.index)
        return ChatCompletion(self._id, self._created, self._request.model, choices, self.tally.usage())

    def begin(self) -> list[ChatChunk]:
        """Who speaks comes before what is said."""
        return [
            self._chunk(ChunkChoice(index, ChatDelta(role="assistant", content=""))) for index in range(self._request.n)
        ]

    def chunks(self, deltas: Sequence[Delta]) -> list[ChatChunk]:
        for delta in deltas:
            self.tally.add(delta)
        chunks = []
        for delta in _by_choice(deltas):
            said, reason = self._read(delta)
            if said.content or said.tool_calls is not UNSET or reason or delta.logprobs or not self._readers:
                chunks.append(self._chunk(ChunkChoice(delta.index, said, self._logprobs(delta), reason)))
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

    def _read(self, delta: Delta) -> tuple[ChatDelta, str | None]:
        """What a delta says in words and in tool calls, and why the answer ends, if it does."""
        reason = delta.reason
        if self._readers is None:
            return ChatDelta(content=delta.text), reason
        reader = self._readers[delta.index]
        text = reader.push(delta.text)
        if reason is None:
            return ChatDelta(content=text), None
        rest, calls = reader.finish()
        if not calls:
            return ChatDelta(content=text + rest), reason
        if self._request.stream:
            for index, call in enumerate(calls):
                call.index = index
        return ChatDelta(content=text, tool_calls=calls), "tool_calls" if reason == "stop" else reason

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not (self._request.logprobs or self._request.top_logprobs):
            return None
        content = []
        for entry in delta.logprobs:
            text = self._model.token_text(entry.token_id)
            top = [self._top(token, value) for token, value in entry.top]
            content.append(ContentLogprob(text, entry.logprob, _bytes(text), top))
        return ChatLogprobs(content)

    def _top(self, token: int, value: float) -> TopLogprob:
        text = self._model.token_text(token)
        return TopLogprob(text, value, _bytes(text))


def _by_choice(deltas: Sequence[Delta]) -> list[Delta]:
    """One delta per completion. EngineFailed if one of them ended because the model failed."""
    grouped: dict[tuple[int, int], list[Delta]] = {}
    for delta in deltas:
        grouped.setdefault((delta.id, delta.index), []).append(delta)
        if delta.reason == "error":
            raise EngineFailed(
                500, "the model failed on this request: its logits are not numbers, or its grammar ends here"
            )
    return [merge(group) for group in grouped.values()]


def _bytes(text: str) -> list[int] | None:
    """The bytes of a token, null where it is a part of a character."""
    return None if "\ufffd" in text else list(text.encode())


def _no_usage(request: CompletionRequest | ChatRequest):
    """Streams with a last chunk for the usage have null in the others; other streams do not mention it."""
    return None if _wants_usage(request) else UNSET


def _wants_usage(request: CompletionRequest | ChatRequest) -> bool:
    return request.stream_options is not None and request.stream_options.include_usage
