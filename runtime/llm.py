"""LLM: an engine, loaded, for use from Python."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from operator import index
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from .errors import RequestError, UsageError
from .executor.base import Executor
from .executor.player import Player
from .format.files import HashPieces
from .format.load import Engine, check_abi, open_engine, read_manifest
from .format.manifest import Manifest
from .loop.engine_loop import EngineLoop
from .requests.embedding import Embedding
from .requests.generation import Completion, Output
from .requests.params import SamplingParams
from .speculate.choose import choose_speculator
from .speculate.speculator import Speculator
from .speculate.typical import LOSSLESS, read_acceptance
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .executor.cuda.driver import Cuda

Prompt = str | Sequence[int]


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    isa: str | None = None,
    verify: bool = True,
    kv_bytes: int | None = None,
    swap_bytes: int | None = None,
    spec: str | None = None,
    spec_accept: str = LOSSLESS,
) -> LLM:
    """Load an engine directory, ready to generate.

    threads: of the kernels (default: the physical cores this process may use). isa: a library of the engine by name
    instead of the best for this machine. verify: compare every file with its sha256 first. kv_bytes: memory for the KV
    cache (default: a full batch of full sequences, within 40 % of the available memory). swap_bytes: of a GPU engine,
    host memory for the KV of preempted requests (default: if its cache can run out, 4 GiB, within 25 % of the available
    memory; 0: it is computed again). spec: the drafter of
    speculative decoding, "none", "medusa", "ngram", "layer-skip" or "draft:ENGINE" (default: what the engine was
    compiled for); it changes no output, unless spec_accept is "typical", which is lossy: sampled requests then take
    guesses that are probable enough (Cai et al. 2024; "typical:EPSILON,DELTA" for other bounds than 0.09,0.3). Errors
    are IccErrors.
    """
    typical = read_acceptance(spec_accept)
    device = _open_device(path)  # before the files are read: a wrong GPU shows at once
    engine = open_engine(path, verify=verify, isa=isa, load_hasher=_hasher)
    try:
        executor = _executor(threads, kv_bytes, swap_bytes, device, engine)
        tokenizer_json = engine.tokenizer_json()
        tokenizer = None if tokenizer_json is None else Tokenizer(tokenizer_json)
        speculator = choose_speculator(spec, engine, executor, partial(_executor, threads, None, 0, device))
        if typical is not None and speculator is None:
            raise UsageError("--spec-accept typical: there is no drafter", "give --spec, or compile the engine with it")
    except BaseException:
        engine.close()
        raise
    if speculator is not None:
        speculator.typical = typical
    return LLM(engine.manifest, executor, tokenizer, engine, speculator)


def _hasher(image: bytes, name: str) -> HashPieces:
    from .executor.cpu.library import KernelLibrary

    return KernelLibrary(image, name).sha256


def _open_device(path: str | os.PathLike[str]) -> Cuda | None:
    """The GPU that an engine needs, checked; None for a CPU engine."""
    manifest = read_manifest(Path(path))
    if manifest.backend == "cpu" or manifest.gpu is None:  # without gpu facts, open_engine refuses it in words
        return None
    check_abi(manifest)
    if manifest.backend != "cuda":
        raise UsageError(
            f"the engine is for target {manifest.target} ({manifest.backend}), which this runtime cannot run yet",
            "compile the model for an NVIDIA GPU or with --target cpu to run it",
        )
    from .executor.cuda.compat import open_device

    return open_device(manifest.target, manifest.gpu)


def _executor(
    threads: int | None,
    kv_bytes: int | None,
    swap_bytes: int | None,
    device: Cuda | None,
    engine: Engine,
    section: str = "",
) -> Executor:
    if device is None:
        if engine.manifest.gpu is not None:
            raise UsageError("an engine for a GPU cannot draft for one that runs on the CPU")
        if swap_bytes:
            raise UsageError("swap_bytes is for GPU engines: the KV cache of a CPU engine is host memory already")
        from .executor.cpu.device import CpuDevice

        return Player(CpuDevice(engine, threads, kv_bytes, section))
    from .executor.cuda.device import CudaDevice

    return Player(CudaDevice(engine, kv_bytes, device, section, swap_bytes))


class LLM:
    """A loaded model. A context manager; not thread-safe.

    Made by `load`; tests may pass any executor with a manifest that describes it.
    """

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        engine: Engine | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.engine = engine
        self.executor = executor
        self.loop = EngineLoop(manifest, executor, tokenizer, speculator)
        self._closed = False

    def generate(
        self, prompts: Sequence[Prompt] | str, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids). All run together, as many at a time as the engine allows.

        `params` is one for all or one per prompt; default: 128 tokens with the engine's sampling defaults. The
        completions come in the order of the prompts, the n completions of one prompt one after the other. RequestError
        (nothing has run then) if a prompt or a parameter is invalid.
        """
        encoded = [self.encode(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        each = _params_for(len(encoded), params)
        generations = []
        try:
            for token_ids, one in zip(encoded, each, strict=True):
                generations += self.loop.add(token_ids, one)
            while any(generation.finish_reason is None for generation in generations):
                self.loop.step()
        finally:  # after an error or an interrupt nothing may run on
            for generation in generations:
                self.loop.abort(generation)
        return [generation.completion() for generation in generations]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion in pieces, as it comes. Closing the iterator ends the request."""
        for output in self.outputs(prompt, params):
            if output.text:
                yield output.text

    def outputs(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Output]:
        """Like `stream`, with token ids, logprobs and the finish reason."""
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError("n must be 1 when streaming", "use generate", field="n")
        [generation] = self.loop.add(self.encode(prompt), params)
        try:
            while True:
                while generation.outputs:
                    output = generation.outputs.popleft()
                    yield output
                    if output.finish_reason is not None:
                        return
                self.loop.step()
        finally:
            self.loop.abort(generation)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Teacher-forced logits, float32 `[len(token_ids), vocab]`: row i is the prediction after tokens 0 .. i."""
        result = np.empty((len(token_ids), self.manifest.model.vocab_size), dtype=np.float32)
        row = 0
        for chunk in self.iter_logits(token_ids):
            result[row : row + len(chunk)] = chunk
            row += len(chunk)
        return result

    def iter_logits(self, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """The rows of `logits` in chunks, so that a long text needs no more memory than a short one."""
        return self.loop.score(token_ids)

    def embed(self, prompts: Sequence[Prompt] | str) -> np.ndarray:
        """One vector per prompt (text, or token ids), float32 `[n, dimension]`, pooled and scaled as the engine says.

        RequestError if a prompt is invalid, or if the engine was compiled to generate.
        """
        embeddings: list[Embedding] = []
        try:
            for prompt in [prompts] if isinstance(prompts, str) else prompts:
                embeddings.append(self.loop.add_embedding(self.encode(prompt)))
            waiting = list(embeddings)
            while waiting:
                self.loop.step()
                for embedding in waiting:
                    embedding.advance()
                waiting = [embedding for embedding in waiting if not embedding.complete]
        finally:
            for embedding in embeddings:
                self.loop.end_score(embedding.request_id)
        vectors = [embedding.vector() for embedding in embeddings]
        return np.stack(vectors) if vectors else np.empty((0, self.executor.vocab_size), dtype=np.float32)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text through the tokenizer with its special tokens, token ids as they are."""
        if not isinstance(prompt, str):
            try:
                return [index(token) for token in prompt]
            except TypeError as error:
                hint = "a prompt is a text or a list of integers; generate takes a list of prompts"
                raise RequestError(f"the prompt is not token ids: {error}", hint, field="prompt") from error
        if self.tokenizer is None:
            raise RequestError("the engine has no tokenizer", "give token ids instead of text", field="prompt")
        return self.tokenizer.encode(prompt)

    def speculator(self, spec: str, adaptive: bool = True) -> Speculator | None:
        """A speculator for this engine, see `load`; `loop.speculator` may be set to it between requests.

        Not `adaptive`, it drafts whatever it costs.
        """
        assert self.engine is not None
        found = choose_speculator(spec, self.engine, self.executor, partial(_executor, None, None, 0, None))
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
        self.executor.close()
        if self.engine is not None:
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    """One SamplingParams per prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts but {len(params)} params", field="params")
    return list(params)
