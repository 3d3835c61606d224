"""Calibration: measures a StepTable of a loaded engine, in some seconds to a minute."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ...executor.base import KVExecutor
from ...llm import LLM
from ...loop.engine_loop import EngineLoop
from ...requests.generation import Generation
from ...requests.params import SamplingParams
from ..engine.kv_file import KV_FOLDER
from ..engine.kv_transfer import KVTransfer, digest_of
from ..engine.messages import Submit
from .step_table import StepTable, TableGroup

_ROUNDS = 5  # measurements of each kind of step; the median counts
_SHORT = 8  # tokens of a prompt short enough that its context has hardly any cost


def calibrate(llm: LLM, progress: Callable[[str, int, int], None] = lambda text, done, total: None) -> StepTable:
    """Time steps of some sizes on an idle engine, whose prefix cache is emptied. progress: called before each, with
    (text, done, total)."""
    return _StepTimer(llm, progress).run()


class _StepTimer:
    def __init__(self, llm: LLM, progress: Callable[[str, int, int], None]) -> None:
        self._llm, self._loop, self._progress = llm, llm.loop, progress
        limits = llm.manifest.limits
        self._batch = min(limits.max_batch_size, llm.loop.executor.max_batch_size)
        self._step, self._length = llm.loop.executor.max_step_tokens, limits.max_seq_len
        self._random, self._done = np.random.default_rng(0), 0

    def run(self) -> StepTable:
        sizes = _doublings(1, self._batch)
        # a prompt of one step leaves room for a generated token
        chunks = _doublings(min(16, self._step), min(self._step, self._length - 2))
        self._total = len(sizes) + len(chunks) + 4
        self._prompt(min(16, chunks[-1]))  # warm
        decode = [(count, self._decode(count, _SHORT)) for count in sizes]
        prompt = [(tokens, self._first_step(tokens)) for tokens in chunks]
        groups = [TableGroup.of(group) for group in self._loop.executor.groups]
        rows, contexts = (
            self._loop.executor.max_logit_rows,
            (self._decode_context(decode[0][1]), self._prompt_context()),
        )
        row, (given, taken) = self._row(decode, prompt), self._moved()
        return StepTable(
            decode, prompt, *contexts, row, taken, self._batch, self._step, rows, groups, given, self._length
        )

    def _tell(self) -> None:
        self._done += 1
        self._progress("steps", self._done, self._total)

    def _tokens(self, count: int) -> list[int]:
        return self._random.integers(3, self._loop.executor.vocab_size, count).tolist()

    def _begin(self, count: int, prompt: int, tokens: int) -> list[Generation]:
        """Start `count` sequences and run them until they decode. prompt, tokens: their lengths."""
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        found = [self._loop.add(self._tokens(prompt), params)[0] for _ in range(count)]
        while any(one.first_token is None for one in found):
            self._loop.step()
        return found

    def _timed(self) -> float:
        start = time.perf_counter()
        self._loop.step()
        return time.perf_counter() - start

    def _end(self, generations: Sequence[Generation]) -> None:
        for one in generations:
            self._loop.end(one)
        while self._loop.has_work():
            self._loop.step()

    def _decode(self, count: int, context: int) -> float:
        self._tell()
        running = self._begin(count, context, count + 2 * _ROUNDS + 4)
        seconds = statistics.median(self._timed() for _ in range(_ROUNDS))
        self._end(running)
        return seconds

    def _first_step(self, tokens: int) -> float:
        self._tell()
        return statistics.median(self._prompt(tokens)[0] for _ in range(3))

    def _prompt(self, tokens: int) -> list[float]:
        """Run a prompt; the seconds of each of its steps."""
        [one] = self._loop.add(self._tokens(tokens), SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        found: list[float] = []
        while one.finish_reason is None:
            found.append(self._timed())
        return found

    def _decode_context(self, short: float) -> float:
        """Seconds per sequence and token of context, in a decode step. short: seconds of a step with hardly any
        context."""
        context = min(self._length // 2, 2048)
        if context <= 2 * _SHORT:
            return 0.0
        return max(self._decode(1, context) - short, 0.0) / (context - _SHORT)

    def _prompt_context(self) -> float:
        """Seconds per token of a chunk and token of context before it."""
        self._tell()
        chunks = min((self._length - 2) // self._step, 4)
        if chunks < 2:
            return 0.0
        steps = self._prompt(chunks * self._step)
        pairs = (chunks - 1) * self._step * self._step
        return max(steps[chunks - 1] - steps[0], 0.0) / pairs

    def _row(self, decode: Sequence[tuple[int, float]], prompt: Sequence[tuple[int, float]]) -> float:
        """Seconds per sequence that decodes beside a prompt, beyond the cost of a prompt token."""
        self._tell()
        count = self._batch // 2
        tokens = min(self._step, self._length - 2) - count
        if count < 1 or tokens < 16:
            return 0.0
        running, found = self._begin(count, _SHORT, 3 * _ROUNDS + count), list[float]()
        for _ in range(3):
            found.append(self._prompt(tokens)[0])
        self._end(running)
        table = StepTable(list(decode), list(prompt), 0.0, 0.0, 0.0, None, 1, 1, 1, [])
        return max(statistics.median(found) - table.prompt_seconds(tokens + count), 0.0) / count

    def _moved(self) -> tuple[float | None, float | None]:
        """Seconds per token whose KV is written to shared memory, and per token whose KV is taken from there; (None,
        None) if this engine cannot transfer KV."""
        self._tell()
        executor, loop = self._loop.executor, self._loop
        kv = loop.scheduler.kv
        if not isinstance(executor, KVExecutor) or not executor.kv_in_reach or kv.whole or kv.evicts:
            return None, None
        with tempfile.TemporaryDirectory(dir=KV_FOLDER) as folder:
            transfer = KVTransfer(digest_of(self._llm.manifest), executor, Path(folder))
            return _moving(loop, transfer, tuple(self._tokens(min(self._length - 2, 1024))))


def _moving(loop: EngineLoop, transfer: KVTransfer, prompt: tuple[int, ...]) -> tuple[float, float] | tuple[None, None]:
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    loop.add(list(prompt), params)
    while loop.has_work():
        loop.step()
    start = time.perf_counter()
    given = transfer.give(loop.scheduler.kv, Submit(1, prompt, params))
    giving = time.perf_counter() - start
    transfer.end(1)
    if given is None:
        return None, None
    loop.reset()
    start = time.perf_counter()
    tokens = transfer.take(loop.scheduler.kv, Submit(1, prompt, params, takes_kv=given.name))
    seconds = time.perf_counter() - start
    loop.reset()
    return (giving / given.length, seconds / tokens) if tokens else (None, None)


def _doublings(first: int, last: int) -> list[int]:
    """first, twice that, and so on below last, and then last."""
    found: list[int] = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]
