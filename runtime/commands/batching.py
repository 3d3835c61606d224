"""`bench --batching`: static and dynamic batches against continuous batching, on the same requests at the same times.

Static and dynamic batches are the baselines of Orca (Yu et al. 2022, OSDI) and of vLLM (Kwon et al. 2023, arXiv
2309.06180), which measure as here: latency per generated token over the rate at which requests come. In their baselines
a batch computes for all of its requests, and answers none, until the longest has ended. Here a request that has ended
takes no part in later steps and is answered at once: the modes differ only in which requests wait.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..errors import UsageError
from ..llm import LLM
from ..loadtest.endpoint import Trace
from ..loadtest.report import curve, details, page
from ..loadtest.summary import Slo, Summary, summarize
from ..loop.driver import EngineTask
from ..requests.params import SamplingParams
from .bench import check_room
from .options import BatchingOptions, BenchOptions

_SHARES = (0.4, 0.7, 1.0)  # of the throughput when all requests come at once; used if no rate is given
_PROMPT, _OUTPUT = 1, 2  # random streams of the seed, for the lengths of prompts and outputs
_NAP_S = 0.0005


@dataclass(frozen=True)
class TimedRequest:
    """A request. due: its arrival, in seconds after the first request's. prompt: token ids. output_tokens: how many to
    generate."""

    due: float
    prompt: Sequence[int]
    output_tokens: int


@dataclass(frozen=True)
class BatchingResult:
    """One mode at one rate (requests per second). ms_per_token: the time from a request's arrival to its last token,
    divided by its tokens; the median over the requests. running: the mean number of requests in a step."""

    mode: str
    rate: float
    ms_per_token: float
    running: float
    summary: Summary


@dataclass
class _Queue:
    """The state from which a mode decides. arrived: waiting requests, the oldest first. running: how many run. more:
    whether others will come. waited: seconds since the oldest waiting request came."""

    arrived: deque[TimedRequest] = field(default_factory=deque)
    running: int = 0
    more: bool = True
    waited: float = 0.0

    def batch(self, size: int) -> int:
        """How many requests a batch that begins now has; 0 while others run."""
        return 0 if self.running else min(len(self.arrived), size)


def _static(queue: _Queue, size: int, window: float) -> int:
    """How many requests to start: a full batch when nothing runs; a smaller one if no more requests will come."""
    return queue.batch(size) if len(queue.arrived) >= size or not queue.more else 0


def _dynamic(queue: _Queue, size: int, window: float) -> int:
    """How many requests to start when nothing runs: a full batch, or all that wait once the oldest has waited `window`
    seconds."""
    return queue.batch(size) if queue.waited >= window else _static(queue, size, window)


def _continuous(queue: _Queue, size: int, window: float) -> int:
    """How many requests to start: at any step all that wait, up to the batch size."""
    return min(len(queue.arrived), size - queue.running)


_DECIDE: dict[str, Callable[[_Queue, int, float], int]] = {
    "static": _static, "dynamic": _dynamic, "continuous": _continuous,
}  # fmt: skip


def run_batching(
    llm: LLM,
    options: BenchOptions,
    batching: BatchingOptions,
    progress: Callable[[str, float, float], None] = lambda text, done, total: None,
) -> list[BatchingResult]:
    """Measure each mode at each rate. UsageError or CapacityError if the engine cannot hold a batch of the longest
    requests.

    Lengths are uniform from 1 to those of the options, arrivals are a Poisson process; both are the same for all modes.
    The batch size is that of the options, or the engine's largest. progress: as for run_bench.
    """
    sizes = options.batch_sizes or (llm.executor.max_batch_size,)
    if len(sizes) != 1:
        raise UsageError("--batching compares modes at one batch size", "give one --batch-size")
    if batching.requests < 1 or not batching.window_s >= 0:
        raise UsageError("--requests must be at least 1, and --window at least 0")
    check_room(llm, options, sizes[0])
    lengths = _lengths(options, batching.requests)
    done, total = 0.0, 1.0 + len(batching.batching) * (len(batching.rate) or len(_SHARES))
    progress("all at once", done, total)
    at_once = _run(llm, _requests(llm, lengths, options.seed, None), "continuous", sizes[0], batching.window_s)
    results = []
    for rate in batching.rate or [share * at_once.summary.requests_per_s for share in _SHARES]:
        requests = _requests(llm, lengths, options.seed, rate)
        for mode in batching.batching:
            done += 1
            progress(f"{mode}, {rate:.3g} requests/s", done, total)
            results.append(_run(llm, requests, mode, sizes[0], batching.window_s, rate))
    return results


def _lengths(options: BenchOptions, count: int) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of each of `count` requests."""
    drawn = [
        np.random.default_rng((options.seed, stream)).integers(1, most + 1, count).tolist()
        for stream, most in ((_PROMPT, options.prompt_tokens), (_OUTPUT, options.output_tokens))
    ]
    return list(zip(*drawn, strict=True))


def _requests(llm: LLM, lengths: Sequence[tuple[int, int]], seed: int, rate: float | None) -> list[TimedRequest]:
    """Requests of these lengths that come at `rate` per second, or all at once if it is None. Rates only scale the
    gaps."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1.0, len(lengths))
    due = (np.cumsum(gaps) - gaps[0]) / rate if rate is not None else np.zeros(len(lengths))
    vocab_size = llm.manifest.model.vocab_size
    return [
        TimedRequest(when, random.integers(0, vocab_size, prompt).tolist(), output)
        for when, (prompt, output) in zip(due.tolist(), lengths, strict=True)
    ]


class _Replay:
    """Sends requests at their times and keeps their traces."""

    def __init__(self, llm: LLM, requests: Sequence[TimedRequest]) -> None:
        self._llm, self._coming = llm, deque(requests)
        self._running: list[tuple[EngineTask, Trace]] = []
        self._begin = time.perf_counter()
        self.queue = _Queue()
        self.traces: list[Trace] = []
        self.steps = self.ran = 0  # steps, and requests summed over the steps

    @property
    def done(self) -> bool:
        """Whether all requests have come and ended."""
        return not (self._coming or self.queue.arrived or self._running)

    def look(self) -> _Queue:
        """The queue as it is now."""
        now, queue = time.perf_counter() - self._begin, self.queue
        while self._coming and self._coming[0].due <= now:
            queue.arrived.append(self._coming.popleft())
        queue.more, queue.running = bool(self._coming), len(self._running)
        queue.waited = now - queue.arrived[0].due if queue.arrived else 0.0
        return queue

    def start(self, count: int) -> None:
        """Send the oldest `count` waiting requests to the engine."""
        for _ in range(count):
            request = self.queue.arrived.popleft()
            params = SamplingParams(
                max_tokens=request.output_tokens, temperature=0.0, repetition_penalty=1.0, ignore_eos=True
            )
            task = self._llm.submit(self._llm.prompting.completion(request.prompt, params))
            trace = Trace(self._begin + request.due, time.perf_counter(), 200, prompt_tokens=len(request.prompt))
            self._running.append((task, trace))
            self.traces.append(trace)

    def step(self) -> None:
        """Run a step, or wait briefly if nothing runs."""
        if not self._running:
            time.sleep(_NAP_S)
            return
        self.steps, self.ran = self.steps + 1, self.ran + len(self._running)
        self._llm.driver.step()
        now = time.perf_counter()
        for task, trace in self._running:
            if task.error is not None:
                raise task.error
            tokens = sum(len(one.token_ids) for one in task.generations)
            trace.pieces += [now] * (tokens - trace.output_tokens)
            trace.output_tokens, trace.end = tokens, now
        self._running = [(task, trace) for task, trace in self._running if not task.done]

    def close(self) -> None:
        """Abort the requests that still run."""
        for task, _ in self._running:
            self._llm.driver.abort(task)


def _run(
    llm: LLM, requests: Sequence[TimedRequest], mode: str, size: int, window: float, rate: float = 0.0
) -> BatchingResult:
    """Run the requests as they come. The prefix cache is empty at first: every mode computes the same prompts."""
    llm.loop.reset()
    replay = _Replay(llm, requests)
    try:
        while not replay.done:
            replay.start(_DECIDE[mode](replay.look(), size, window))
            replay.step()
    finally:  # after an error or an interrupt
        replay.close()
    per_token = [(trace.end - trace.due) / trace.output_tokens for trace in replay.traces]
    summary = summarize(f"{mode} at {rate:.3g}/s", replay.traces, Slo())
    return BatchingResult(mode, rate, 1e3 * statistics.median(per_token), replay.ran / max(replay.steps, 1), summary)


def as_table(results: Sequence[BatchingResult]) -> str:
    """The results as a text table; times in milliseconds."""
    lines = ["requests/s  mode        ms/token  out tok/s  running  TTFT p50       p99   e2e p50       p99"]
    for one in results:
        times = [values[name] for values in (one.summary.ttft_ms, one.summary.e2e_ms) for name in ("p50", "p99")]
        lines.append(
            f"{one.rate:10.3g}  {one.mode:<10}  {one.ms_per_token:8.2f}  {one.summary.output_tokens_per_s:9.1f}"
            f"  {one.running:7.2f}  {'  '.join(f'{value:8.1f}' for value in times)}"
        )
    return "\n".join(lines)


def as_json(results: Sequence[BatchingResult]) -> list[dict[str, Any]]:
    """The results as plain values for JSON."""
    return [asdict(one) for one in results]


def as_html(llm: LLM, options: BenchOptions, batching: BatchingOptions, results: Sequence[BatchingResult]) -> str:
    """A page with the facts of the run, one chart, and the table of all runs."""
    model = llm.manifest.model.architecture
    facts = {
        "model": f"{model}, {llm.manifest.quantization.method}, for {llm.manifest.target}",
        "prompt tokens": f"1 to {options.prompt_tokens}",
        "output tokens": f"1 to {options.output_tokens}",
        "requests per run": str(batching.requests),
        "batch size": ", ".join(map(str, options.batch_sizes)) or str(llm.executor.max_batch_size),
        "dynamic": f"waits {1e3 * batching.window_s:g} ms for a batch",
        "seed": str(options.seed),
    }
    series = {mode: [(one.rate, one.ms_per_token) for one in results if one.mode == mode] for mode in batching.batching}
    chart = curve("Median latency per token (ms) over requests/s", series)
    return page(f"Batching on {model}", facts, details([one.summary for one in results]) + chart)
