"""LLM: a loaded engine for use from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Unpack, cast, overload

from msgspec.structs import replace

from .batch.scheduled import NO_EXTRAS, Extras
from .chat_options import ChatOptions, RenderOptions
from .embed_prompts import EmbedOptions
from .errors import RequestError
from .executor.base import AdaptingExecutor, Executor
from .executor.open import open_executor
from .format.load import Engine
from .format.manifest import Manifest
from .loop.driver import NO_ROOM, EngineTask, LoopDriver
from .loop.engine_loop import EngineLoop
from .prompting import Prompt, Prompting
from .query import Adapters, Query, adapted
from .requests.embedding import Ranked, ranked, stacked
from .requests.generation import Completion, Generation
from .requests.increment import Increment
from .requests.params import SamplingParams
from .speculate.choose import MakeExecutor, choose_speculator
from .templates.messages import Messages, is_messages
from .templates.source import TemplateSource
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

    from .adapters.resident import ResidentAdapters
    from .reading.answer import Answer
    from .speculate.speculator import Speculator
else:
    from .late import np

_DEFAULT = "default"  # the name that `use_adapter` gives its adapter
Progress = Callable[[int, int], object]  # (number done, total)


def _room(executor: Executor, engine: Engine | None) -> ResidentAdapters | None:
    """The adapters of an engine; None if it has no room for adapters."""
    if engine is None or not isinstance(executor, AdaptingExecutor) or executor.adapters is None:
        return None
    from .adapters.base_weights import BaseWeights
    from .adapters.bases import model_of
    from .adapters.resident import ResidentAdapters
    from .format.load import weights_of_other_ranks

    base = BaseWeights(engine.program.weights, engine.weights.view, [w.view for w in weights_of_other_ranks(engine)])
    vocab_size = engine.manifest.model.vocab_size
    return ResidentAdapters(executor.adapters, executor, base, model=model_of(engine), vocab_size=vocab_size)


class LLM:
    """A loaded model. A context manager; not thread-safe (AsyncLLM is for many requests at once).

    Made by `load`. Tests may pass any executor with a manifest that describes it, and the place of its chat template.
    """

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        engine: Engine | None = None,
        speculator: Speculator | None = None,
        template: TemplateSource | None = None,
        make_executor: MakeExecutor = open_executor,
    ) -> None:
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.engine = engine
        self.executor = executor
        self._make_executor = make_executor
        self.prompting = Prompting(manifest, tokenizer, engine, template)
        embedding, tail = manifest.embedding, ()
        if engine is not None and embedding is not None and embedding.tail:
            from .requests.tail import read_tail

            tail = read_tail(embedding, engine.files.read)
        self.loop = EngineLoop(manifest, executor, tokenizer, speculator, tail)
        self.adapters, self._adapter = _room(executor, engine), ""  # the adapter of requests that name none
        self.driver: LoopDriver[EngineTask] = LoopDriver(self.loop, adapters=self.adapters)
        self._closed = False

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress | None = None,
        adapter: Adapters = None,
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids). All run together, as many at a time as the engine allows.

        params: one for all prompts or one per prompt; None: 128 tokens with the engine's sampling defaults, greedy if
        it has none. adapter: the name of a loaded adapter, for all or per prompt; None: no adapter. The completions are
        in the order of the prompts, the n completions of a prompt one after the other. progress: called with the number
        of ended completions and the total, after every step in which one ended. RequestError, before anything has run,
        if a prompt or a parameter is invalid.
        """
        given = [prompts] if isinstance(prompts, str) else prompts
        queries = self.prompting.queries(given, params)
        return self._complete(adapted(queries, adapter), progress)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load an adapter (LoRA) that requests may name: a PEFT directory, or a GGUF file of llama.cpp.

        An adapter that had the name is replaced; requests that run with it keep it. AdapterError if it cannot be read,
        RequestError if the engine has no room for its changes.
        """
        self._room().add(name, Path(path))

    def use_adapter(self, path: str | Path) -> None:
        """Load an adapter for all later requests that name none; see `load_adapter`."""
        self.load_adapter(_DEFAULT, path)
        self._adapter = _DEFAULT

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. RequestError if no adapter has the name."""
        self._room().remove(name)

    add_adapter, remove_adapter = load_adapter, unload_adapter  # both names of each pair are public

    def _room(self) -> ResidentAdapters:
        if self.adapters is None:
            raise RequestError(NO_ROOM, "compile the model with --adapters 8x16", field="adapter")
        return self.adapters

    @overload
    def chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion | list[Completion]:
        """Answer a conversation: dicts with `role` and `content`, rendered by the model's own chat template.

        One conversation gives one Completion, several give a list as `generate` does. params None: the answer may fill
        the context. Sampling parameters that are left out are the model's defaults, and temperature 1.0 if it has none,
        as in OpenAI's API. options: see ChatOptions. With `tools`, the answer's calls are in `tool_calls`; to continue,
        append its `message` and the calls' results to the messages. RequestError if the engine has no template, or if
        the template refuses the messages.
        """
        if not is_messages(messages):
            return self._complete(self.prompting.chats(cast(Sequence[Messages], messages), params, options))
        if isinstance(params, SamplingParams) and params.n != 1:
            raise RequestError("n must be 1 for one conversation", "give a list of conversations", field="n")
        [completion] = self._complete(self.prompting.chats([messages], params, options))
        return completion

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Iterator[Increment]:
        """Stream one completion of a prompt or of messages (see `generate` and `chat`).

        An Increment is a text with its token ids and the tool calls that it completes; the last one states why the
        completion ended. Closing the iterator ends the request.
        """
        query = self.prompting.query(prompt, params, options)
        if query.params.n != 1:
            raise RequestError("n must be 1 when streaming", "use generate", field="n")
        return self._increments(query)

    def submit(self, query: Query) -> EngineTask:
        """Queue a query made by `prompting`; `driver` runs it and can abort it."""
        if self._adapter and not query.adapter:
            query = replace(query, adapter=self._adapter)
        task = EngineTask(query, constrain=self.prompting.compiled(query.grammar))
        self.driver.submit(task)
        return task

    def begin(self, query: Query) -> tuple[EngineTask, Generation]:
        """Queue a query of one completion, and run steps until the completion is queued; its adapter may have to be
        loaded first."""
        task = self.submit(query)
        try:
            while not task.generations:
                if task.error is not None:
                    raise task.error
                self.driver.step()
        except BaseException:
            self.driver.abort(task)
            raise
        [generation] = task.generations
        return task, generation

    def _complete(self, queries: Sequence[Query], progress: Progress | None = None) -> list[Completion]:
        tasks: list[EngineTask] = []
        try:
            for query in queries:
                tasks.append(self.submit(query))
            total = sum(query.params.n for query in queries)
            left = total + 1
            while running := total - sum(task.num_ended for task in tasks):
                for task in tasks:
                    if task.error is not None:
                        raise task.error
                if progress is not None and running < left:
                    progress(total - running, total)
                left = running
                self.driver.step()
            if progress is not None:
                progress(total, total)
        finally:  # after an error or an interrupt no request may continue
            for task in tasks:
                self.driver.abort(task)
        return [one.completion().read_by(task.query.read) for task in tasks for one in task.generations]

    def _increments(self, query: Query) -> Iterator[Increment]:
        task, generation = self.begin(query)
        answer: Answer | None = None
        if query.read is not None:
            from .reading.answer import Answer

            answer = Answer(query.read)
        try:
            while True:
                while generation.outputs:
                    increment = Increment.of(generation.outputs.popleft()).read_by(answer)
                    yield increment
                    if increment.finish_reason is not None:
                        return
                self.driver.step()
        finally:
            self.driver.abort(task)

    def logits(self, token_ids: Sequence[int], extras: Extras = NO_EXTRAS, adapter: str = "") -> np.ndarray:
        """Teacher-forced logits, float32 `[len(token_ids), vocab]`: row i is the prediction after tokens 0 .. i.
        extras: see `Prompting.completion`. adapter: the name of a loaded adapter, "" for none."""
        token_ids = self.prompting.ids(token_ids)
        result = np.empty((len(token_ids), self.manifest.model.vocab_size), dtype=np.float32)
        row = 0
        for chunk in self.iter_logits(token_ids, extras, adapter):
            result[row : row + len(chunk)] = chunk
            row += len(chunk)
        return result

    def iter_logits(
        self, token_ids: Sequence[int], extras: Extras = NO_EXTRAS, adapter: str = ""
    ) -> Iterator[np.ndarray]:
        """The rows of `logits` in chunks, float32 `[rows, vocab]`, so that a long text needs no more memory than a
        short one."""
        return self.driver.scores(Query(self.prompting.ids(token_ids), extras=extras, adapter=adapter))

    def embed(
        self,
        prompts: Sequence[Prompt] | str,
        *,
        dimensions: int | None = None,
        adapter: Adapters = None,
        **options: Unpack[EmbedOptions],
    ) -> np.ndarray:
        """One vector per prompt (text, or token ids), float32 `[n, dimension]`, pooled and normalized as the engine's
        manifest says.

        dimensions: keep only the first so many elements, scaled to length 1 again (Matryoshka); None: all. adapter: see
        `generate`. options: see EmbedOptions. RequestError if a prompt is invalid, or if the engine was compiled to
        generate.
        """
        facts = self.loop.requests.intake.check_scores(False)
        given = [prompts] if isinstance(prompts, str) else prompts
        queries = [self.prompting.embedding(prompt, options) for prompt in given]
        return stacked(self._vectors(adapted(queries, adapter)), facts, dimensions)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> list[Ranked]:
        """The documents ranked by their relevance to the query, best first; top_n: only the best so many, None: all.

        truncate: if a pair is too long, cut the end of its longer text. adapter: see `generate`. RequestError if a text
        is invalid, or if the engine was not compiled with --task rerank.
        """
        facts = self.loop.requests.intake.check_scores(True)
        longest = self.manifest.limits.max_seq_len if truncate else None
        pairs = [self.prompting.pair(query, document, longest) for document in documents]
        return ranked(documents, self._vectors(adapted(pairs, adapter)), facts)[:top_n]

    def _vectors(self, prompts: Iterable[Query]) -> list[np.ndarray]:
        """The vector of each prompt, float32 [width]."""
        tasks: list[EngineTask] = []
        try:
            for prompt in prompts:
                tasks.append(self.submit(prompt))
            waiting = tasks
            while waiting := [task for task in waiting if task.vector is None]:
                for task in waiting:
                    if task.error is not None:
                        raise task.error
                self.driver.step()
        finally:
            for task in tasks:
                self.driver.abort(task)
        return [task.vector for task in tasks if task.vector is not None]

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text is tokenized with special tokens; token ids are returned unchanged."""
        return self.prompting.encode(prompt)

    def render(self, messages: Messages, **options: Unpack[RenderOptions]) -> str:
        """The text of a conversation rendered by the engine's chat template, as `chat` passes it to the model."""
        return self.prompting.render(messages, **options)

    def speculator(self, spec: str, adaptive: bool = True) -> Speculator | None:
        """A speculator for this engine, None for "none"; `loop.speculator` may be set to it between requests. spec: see
        LoadOptions.

        adaptive: whether it stops drafting when that does not pay; if not, it always drafts.
        """
        assert self.engine is not None
        found = choose_speculator(spec, self.engine, self.executor, self._make_executor, adapters=self.adapters)
        if found is not None:
            found.adaptive = adaptive
        return found

    def close(self) -> None:
        """Stop the kernels' threads and free all memory. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self.loop.speculator is not None:
            self.loop.speculator.drafter.close()
        if self.adapters is not None:
            self.adapters.close()
        self.executor.close()
        if self.engine is not None:
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
