"""`bench`: prefill and decode throughput of a loaded engine on random tokens; an embedding engine has no decode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from ..errors import CapacityError, UsageError
from ..kv.config import Demand
from ..llm import LLM
from ..requests.params import SamplingParams
from .options import BenchOptions

SMALLER = "give a smaller --batch-size, or compile with a larger --max-batch-size"
_WARMUP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Medians over the rounds for one batch size. threads: of the kernels, if several numbers are compared, else None.

    Prefill: prompt tokens over the time until every sequence has its first token. Decode: all later tokens over the
    rest. `ttft_ms` is the time to the first token of the whole batch, `ms_per_token` the time between tokens of one
    sequence.
    """

    threads: int | None
    batch_size: int
    prompt_tokens: int
    output_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_ms: float
    ms_per_token: float


def run_bench(
    llm: LLM,
    options: BenchOptions,
    progress: Callable[[str, float, float], None] = lambda text, done, total: None,
    threads: int | None = None,
) -> list[BenchResult]:
    """Measure each batch size. UsageError or CapacityError if the engine cannot hold a whole batch at once.

    An embedding engine generates no tokens. progress: called with what is measured next, the work done, and the
    estimated work in all. threads: the number of threads to state in the results; None: state none.
    """
    if llm.manifest.embedding is not None:
        options = replace(options, output_tokens=0)
    sizes = options.batch_sizes or (1,)
    for batch_size in sizes:
        check_room(llm, options, batch_size)
    random = np.random.Generator(np.random.PCG64(options.seed))
    results: list[BenchResult] = []
    warmup = min(_WARMUP_TOKENS, options.output_tokens)
    outputs = (warmup, *[options.output_tokens] * options.rounds)
    done, total = 0.0, sum(_work(b, options.prompt_tokens, n) for b in sizes for n in outputs)
    for batch_size in sizes:
        times = []
        for output_tokens in outputs:
            progress(f"batch size {batch_size}", done, total)
            times.append(_round(llm, random, batch_size, options.prompt_tokens, output_tokens))
            done += _work(batch_size, options.prompt_tokens, output_tokens)
        times = times[1:]
        prefill = statistics.median(prefill for prefill, _, _ in times)
        rates = [tokens / seconds if seconds > 0 else 0.0 for _, seconds, tokens in times]
        rate = statistics.median(rates)
        results.append(
            BenchResult(
                threads=threads,
                batch_size=batch_size,
                prompt_tokens=options.prompt_tokens,
                output_tokens=options.output_tokens,
                prefill_tokens_per_s=batch_size * options.prompt_tokens / prefill,
                decode_tokens_per_s=rate,
                ttft_ms=prefill * 1e3,
                ms_per_token=batch_size / rate * 1e3 if rate > 0 else 0.0,
            )
        )
    return results


def _work(batch_size: int, prompt_tokens: int, output_tokens: int) -> float:
    """The approximate cost of a round, in steps: a step reads all weights, whatever its batch, and a prompt token takes
    a tenth of that."""
    return 0.1 * batch_size * prompt_tokens + output_tokens * (1 + 0.1 * batch_size)


def check_room(llm: LLM, options: BenchOptions, batch_size: int) -> None:
    """UsageError or CapacityError if the engine cannot hold so many sequences of these lengths at once."""
    limits, executor = llm.manifest.limits, llm.executor
    length = options.prompt_tokens + options.output_tokens
    least_output = int(llm.manifest.embedding is None)
    if min(options.prompt_tokens, batch_size, options.rounds) < 1 or options.output_tokens < least_output:
        raise UsageError("prompt tokens, output tokens, batch size and rounds must be at least 1")
    if length > limits.max_seq_len:
        raise UsageError(
            f"{options.prompt_tokens} + {options.output_tokens} tokens exceed the engine's {limits.max_seq_len}",
            "lower --prompt-tokens or --output-tokens, or compile with a larger --max-seq-len",
        )
    if batch_size > executor.max_batch_size:
        raise UsageError(f"batch size {batch_size} exceeds the engine's {executor.max_batch_size}", SMALLER)
    if llm.loop.scheduler.kv.too_small([Demand(length)] * batch_size) is not None:
        raise CapacityError(
            f"{batch_size} sequences of {length} tokens do not fit in the KV cache at once",
            "give a smaller --batch-size, or the KV cache more memory (--kv-mib)",
        )


def _round(
    llm: LLM, random: np.random.Generator, batch_size: int, prompt_tokens: int, output_tokens: int
) -> tuple[float, float, int]:
    """One round on random prompts; returns as `timed_generation`."""
    vocab_size = llm.manifest.model.vocab_size
    prompts = random.integers(0, vocab_size, size=(batch_size, prompt_tokens))
    if llm.manifest.embedding is not None:
        start = time.perf_counter()
        llm.embed(prompts.tolist())
        return time.perf_counter() - start, 0.0, 0
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
    return timed_generation(llm, prompts.tolist(), params)


def timed_generation(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> tuple[float, float, int]:
    """Run prompts together: (seconds until all have a first token, seconds after that, tokens generated after that)."""
    queries = [llm.prompting.completion(prompt, params) for prompt in prompts]
    generations = [generation for query in queries for generation in llm.submit(query).generations]
    start = time.perf_counter()
    while any(generation.first_token is None for generation in generations):
        llm.driver.step()
    middle = time.perf_counter()
    before = sum(len(generation.token_ids) for generation in generations)
    while any(generation.finish_reason is None for generation in generations):
        llm.driver.step()
    end = time.perf_counter()
    after = sum(len(generation.token_ids) for generation in generations)
    return middle - start, end - middle, after - before


def as_table(results: Sequence[BenchResult]) -> str:
    """The results as a text table."""
    several = len({result.threads for result in results}) > 1
    lines = ["threads  " * several + "batch  prompt  output   prefill tok/s   decode tok/s    ttft ms   ms/token"]
    for result in results:
        lines.append(
            (f"{result.threads:7d}  " if several else "")
            + f"{result.batch_size:5d}  {result.prompt_tokens:6d}  {result.output_tokens:6d}  "
            f"{result.prefill_tokens_per_s:14.1f}  {result.decode_tokens_per_s:13.1f}  "
            f"{result.ttft_ms:9.1f}  {result.ms_per_token:9.2f}"
        )
    return "\n".join(lines)


def as_json(results: Sequence[BenchResult]) -> list[dict[str, object]]:
    """The results as plain values for JSON."""
    return [{k: round(value, 3) for k, value in asdict(result).items() if value is not None} for result in results]
