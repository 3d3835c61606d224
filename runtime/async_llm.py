"""AsyncLLM: an engine, loaded, for many requests at once from asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from types import TracebackType
from typing import TypeVar, Unpack, cast, overload

from .errors import IccError, RequestError
from .format.manifest import Manifest
from .llm import LLM, load_with_fields, open_llm
from .loop.engine_thread import EngineThread, News, Question
from .options import LoadOptions
from .prompting import ChatOptions, Prompt, Prompting, params_for
from .requests.generation import Completion
from .requests.increment import Increment
from .requests.params import SamplingParams
from .templates.messages import Messages, is_messages

T = TypeVar("T")


@load_with_fields(LoadOptions)
def load_async(options: LoadOptions) -> AsyncLLM:
    """An engine for asyncio: `async with icc.load_async("model.engine") as llm:`, or `llm = await icc.load_async(...)`
    and `await llm.close()`. The keywords are the fields of LoadOptions. Errors are IccErrors."""
    return AsyncLLM(lambda: open_llm(options))


class AsyncLLM:
    """A model that answers requests side by side: whatever tasks ask at the same time runs in one batch, in a thread of
    the engine's own.

    Made by `load_async`; tests may pass what makes any LLM. A request whose task is cancelled, or whose stream is
    closed, ends at once and frees its place.
    """

    def __init__(self, open_model: Callable[[], LLM]) -> None:
        self._open_model = open_model
        self._thread: EngineThread[LLM] | None = None
        self._llm: LLM | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> AsyncLLM:
        """Load the engine, without holding up the event loop. Nothing happens if it is loaded."""
        if self._llm is None:
            loop = asyncio.get_running_loop()
            ready: asyncio.Future[LLM | BaseException] = loop.create_future()
            thread = EngineThread(self._open_model, lambda found: _post(loop, _settle, ready, found))
            try:
                found = await ready
            except asyncio.CancelledError:
                thread.close(wait=False)
                raise
            if isinstance(found, BaseException):
                raise found
            self._thread, self._llm = thread, found
        return self

    async def close(self) -> None:
        """End all requests, with an IccError for those who wait, and free the engine. Calling it again does nothing."""
        thread, self._thread, self._llm = self._thread, None, None
        if thread is not None:
            await asyncio.shield(asyncio.to_thread(thread.close))

    def __await__(self) -> Generator[object, None, AsyncLLM]:
        return self.start().__await__()

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def manifest(self) -> Manifest:
        """What the engine is; see LLM."""
        return self._loaded.manifest

    @property
    def prompting(self) -> Prompting:
        return self._loaded.prompting

    @property
    def _loaded(self) -> LLM:
        if self._llm is None:
            raise IccError("the engine is not loaded", "use it within `async with icc.load_async(...) as llm:`")
        return self._llm

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self, prompts: Sequence[Prompt] | str, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids); see `LLM.generate`."""
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        each = params_for(len(given), params)
        prompting = self.prompting
        return await self._complete(await asyncio.to_thread(lambda: [prompting.encode(p) for p in given]), each)

    @overload
    async def chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Completion: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]: ...

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion | list[Completion]:
        """Answer one conversation, or several; see `LLM.chat`."""
        one = is_messages(messages)
        conversations = [messages] if one else cast(Sequence[Messages], messages)
        if one and isinstance(params, SamplingParams) and params.n != 1:
            raise RequestError("n must be 1 for one conversation", "give a list of conversations", field="n")
        prepared = await asyncio.to_thread(self.prompting.prepare_chats, conversations, params, options)
        completions = await self._complete(*prepared)
        return completions[0] if one else completions

    async def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncIterator[Increment]:
        """One completion in pieces as it comes, of a prompt or of messages; see `LLM.stream`."""
        encoded, params = await asyncio.to_thread(self.prompting.prepare, prompt, params, options)
        if params.n != 1:
            raise RequestError("n must be 1 when streaming", "use generate", field="n")
        question, news = await self._ask(encoded, params, streamed=True)
        try:
            while isinstance(told := await news.get(), Increment):
                yield told
            if isinstance(told, BaseException):
                raise told
        finally:
            self._cancel([question])

    async def _complete(self, encoded: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        questions: list[Question] = []
        try:
            asked = []
            for token_ids, one in zip(encoded, params, strict=True):
                question, news = await self._ask(token_ids, one)
                questions.append(question)
                asked.append(news)
            completions: list[Completion] = []
            for news in asked:
                told = await news.get()
                if isinstance(told, BaseException):
                    raise told
                completions += cast("list[Completion]", told)
            return completions
        finally:
            self._cancel(questions)

    async def _ask(
        self, token_ids: Sequence[int], params: SamplingParams, streamed: bool = False
    ) -> tuple[Question, asyncio.Queue[News]]:
        """Put a question to the engine; what it tells comes in the queue."""
        constrain = None
        if params.asks_for_a_form:
            params, constrain = await asyncio.to_thread(self.prompting.constrained, params)
        loop, news = asyncio.get_running_loop(), asyncio.Queue[News]()
        question = Question(token_ids, params, constrain, lambda told: _post(loop, news.put_nowait, told), streamed)
        if self._thread is None:
            raise IccError("the engine was closed")
        self._thread.ask(question)
        return question, news

    def _cancel(self, questions: Sequence[Question]) -> None:
        """End what has not ended of them."""
        for question in questions:
            if self._thread is not None:
                self._thread.cancel(question)


def _settle(ready: asyncio.Future[T], found: T) -> None:
    if not ready.done():
        ready.set_result(found)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """Call something in the event loop, from another thread, unless the loop has gone."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        pass
