"""AsyncLLM: a loaded engine that answers many requests at once from asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar, Unpack, cast, overload

import numpy as np

from .chat_options import ChatOptions
from .embed_prompts import EmbedOptions
from .errors import IccError, RequestError
from .format.manifest import Manifest
from .llm import LLM
from .loading import load_with_fields, open_llm
from .loop.engine_thread import EngineThread, News, Question
from .options import LoadOptions
from .prompting import Prompt, Prompting
from .query import Adapters, Query, adapted
from .reading.answer import Answer
from .requests.embedding import Ranked, ranked, stacked
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
    """A model that answers requests concurrently: requests of several tasks run in one batch, in the engine's own
    thread.

    Made by `load_async`; tests may pass another factory of an LLM. A request whose task is cancelled, or whose stream
    is closed, ends at once and frees its blocks.
    """

    def __init__(self, open_model: Callable[[], LLM]) -> None:
        self._open_model = open_model
        self._thread: EngineThread[LLM] | None = None
        self._llm: LLM | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> AsyncLLM:
        """Load the engine without blocking the event loop; does nothing if it is loaded."""
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
        """End all requests (tasks that wait get an IccError) and free the engine. Calling it again does nothing."""
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
        """The manifest of the engine; see LLM."""
        return self._loaded.manifest

    @property
    def prompting(self) -> Prompting:
        """Turns texts and conversations into token ids for this model."""
        return self._loaded.prompting

    @property
    def _loaded(self) -> LLM:
        if self._llm is None:
            raise IccError("the engine is not loaded", "use it within `async with icc.load_async(...) as llm:`")
        return self._llm

    # -- adapters ----------------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Load an adapter that requests may name, while others run; see `LLM.load_adapter`."""
        await asyncio.to_thread(self._loaded.load_adapter, name, path)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; see `LLM.unload_adapter`."""
        self._loaded.unload_adapter(name)

    add_adapter, remove_adapter = load_adapter, unload_adapter

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: Adapters = None,
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids); see `LLM.generate`."""
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        queries = await asyncio.to_thread(self.prompting.queries, given, params)
        return await self._complete(adapted(queries, adapter))

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
        completions = await self._complete(
            await asyncio.to_thread(self.prompting.chats, conversations, params, options)
        )
        return completions[0] if one else completions

    async def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncIterator[Increment]:
        """Stream one completion of a prompt or of messages; see `LLM.stream`."""
        query = await asyncio.to_thread(self.prompting.query, prompt, params, options)
        if query.params.n != 1:
            raise RequestError("n must be 1 when streaming", "use generate", field="n")
        question, news = await self._ask(query, streamed=True)
        answer = None if query.read is None else Answer(query.read)
        try:
            while isinstance(told := await news.get(), Increment):
                yield (increment := told.read_by(answer))
                if increment.finish_reason is not None and told.finish_reason is None:
                    return  # all the calls that were asked for have arrived
            if isinstance(told, BaseException):
                raise told
        finally:
            self._cancel([question])

    async def embed(
        self,
        prompts: Sequence[Prompt] | str,
        *,
        dimensions: int | None = None,
        adapter: Adapters = None,
        **options: Unpack[EmbedOptions],
    ) -> np.ndarray:
        """One vector per prompt, float32 `[n, dimension]`; see `LLM.embed`."""
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        facts = self._loaded.loop.requests.intake.check_scores(False)
        encode = self.prompting.embedding
        encoded = await asyncio.to_thread(lambda: [encode(prompt, options) for prompt in given])
        return stacked(await self._vectors(adapted(encoded, adapter)), facts, dimensions)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> list[Ranked]:
        """The documents ranked by their relevance to the query; see `LLM.rerank`."""
        facts = self._loaded.loop.requests.intake.check_scores(True)
        longest = self._loaded.manifest.limits.max_seq_len if truncate else None
        pairs = [await asyncio.to_thread(self.prompting.pair, query, one, longest) for one in documents]
        return ranked(documents, await self._vectors(adapted(pairs, adapter)), facts)[:top_n]

    async def _vectors(self, queries: Sequence[Query]) -> list[np.ndarray]:
        """The vector of each query, float32 [width]."""
        return cast("list[np.ndarray]", await self._told(queries))

    async def _complete(self, queries: Sequence[Query]) -> list[Completion]:
        told = cast("list[list[Completion]]", await self._told(queries))
        return [one.read_by(query.read) for query, found in zip(queries, told, strict=True) for one in found]

    async def _told(self, queries: Sequence[Query]) -> list[News]:
        """The engine's last news of each query. Raises the error of a query that failed."""
        questions: list[Question] = []
        try:
            asked: list[asyncio.Queue[News]] = []
            for query in queries:
                question, news = await self._ask(query)
                questions.append(question)
                asked.append(news)
            told: list[News] = []
            for news in asked:
                found = await news.get()
                if isinstance(found, BaseException):
                    raise found
                told.append(found)
            return told
        finally:
            self._cancel(questions)

    async def _ask(self, query: Query, streamed: bool = False) -> tuple[Question, asyncio.Queue[News]]:
        """Submit a query to the engine; its news arrive in the queue."""
        constrain = None if not query.grammar else await asyncio.to_thread(self.prompting.compiled, query.grammar)
        loop, news = asyncio.get_running_loop(), asyncio.Queue[News]()
        tell = partial(_post, loop, news.put_nowait)
        question = Question(query, constrain=constrain, tell=tell, streamed=streamed)
        if self._thread is None:
            raise IccError("the engine was closed")
        self._thread.ask(question)
        return question, news

    def _cancel(self, questions: Sequence[Question]) -> None:
        """Cancel those that have not ended."""
        for question in questions:
            if self._thread is not None:
                self._thread.cancel(question)


def _settle(ready: asyncio.Future[T], found: T) -> None:
    if not ready.done():
        ready.set_result(found)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """Schedule a call in the event loop from another thread; does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        pass
