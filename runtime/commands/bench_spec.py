"""`bench --spec`: every drafter against plain decoding, in turns in the same run, on prompts of text."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from ..errors import UsageError
from ..llm import LLM
from ..requests.params import SamplingParams
from ..speculate.choose import NONE
from ..speculate.speculator import Speculator
from .bench import SMALLER, timed_generation


@dataclass(frozen=True, slots=True)
class SpecBenchOptions:
    """What to measure: every drafter at every batch size, on these prompts (token ids).

    always: draft as much as the drafter gives at every step, whatever it costs, to see what share is accepted.
    """

    drafters: Sequence[str]
    prompts: Sequence[Sequence[int]]
    output_tokens: int = 128
    batch_sizes: Sequence[int] = (1,)
    rounds: int = 3
    temperature: float = 0.0
    always: bool = False


@dataclass(frozen=True, slots=True)
class SpecBenchResult:
    """One drafter at one batch size: medians over the rounds.

    tokens_per_step: of one request, over its decode steps. accepted: the share of guesses that were accepted. speedup:
    against plain decoding of the same prompts in the same round.
    """

    drafter: str
    batch_size: int
    tokens_per_step: float
    accepted: float
    decode_tokens_per_s: float
    speedup: float


def read_prompts(llm: LLM, path: Path) -> list[list[int]]:
    """Token ids of the prompts in a file that is a JSON list of texts. UsageError if it is not."""
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{path} is not a JSON list of texts", 'write ["one", "another"]')
    return [llm.encode(text) for text in texts]


def run_spec_bench(
    llm: LLM, options: SpecBenchOptions, progress: Callable[[str, float, float], None] = lambda text, done, total: None
) -> list[SpecBenchResult]:
    """Measure; UsageError if the engine cannot hold a prompt and its output, or lacks what a drafter needs.

    progress: as for run_bench.
    """
    longest = max(len(prompt) for prompt in options.prompts) + options.output_tokens
    most = llm.manifest.limits.max_seq_len
    if longest > most:
        raise UsageError(
            f"a prompt and its output have {longest} tokens, the engine takes at most {most}",
            "give shorter prompts, lower --output-tokens, or compile with a larger --max-seq-len",
        )
    names = [name for name in options.drafters if name != NONE]
    speculators = {name: llm.speculator(name, adaptive=not options.always) for name in names}
    results: list[SpecBenchResult] = []
    before = llm.loop.speculator
    runs = 1 + options.rounds * (1 + len(speculators))
    done, total = 0.0, sum(runs / max(batch_size, 1) for batch_size in options.batch_sizes)

    def rate(speculator: Speculator | None, batch_size: int) -> float:
        nonlocal done
        progress(f"batch size {batch_size}", done, total)
        done += 1 / batch_size
        return _rate(llm, options, batch_size, speculator)

    try:
        for batch_size in options.batch_sizes:
            if batch_size > llm.executor.max_batch_size:
                raise UsageError(f"batch size {batch_size} exceeds the engine's {llm.executor.max_batch_size}", SMALLER)
            results += _measure(options.rounds, batch_size, speculators, partial(rate, batch_size=batch_size))
    finally:
        llm.loop.speculator = before
    return results


def _measure(
    rounds: int,
    batch_size: int,
    speculators: dict[str, Speculator | None],
    rate: Callable[[Speculator | None], float],
) -> list[SpecBenchResult]:
    rate(None)  # warms up, and puts the prompts into the prefix cache
    rates: dict[str, list[float]] = {name: [] for name in speculators}
    gains: dict[str, list[float]] = {name: [] for name in speculators}
    plain: list[float] = []
    first = {name: _counts(found) for name, found in speculators.items()}
    for _ in range(rounds):
        plain.append(rate(None))
        for name, found in speculators.items():
            rates[name].append(rate(found))
            gains[name].append(rates[name][-1] / plain[-1])
    results = [SpecBenchResult(NONE, batch_size, 1.0, 0.0, statistics.median(plain), 1.0)]
    for name, found in speculators.items():
        tokens, steps, guesses, accepted = (now - then for now, then in zip(_counts(found), first[name], strict=True))
        results.append(
            SpecBenchResult(
                drafter=name,
                batch_size=batch_size,
                tokens_per_step=tokens / max(steps, 1),
                accepted=accepted / max(guesses, 1),
                decode_tokens_per_s=statistics.median(rates[name]),
                speedup=statistics.median(gains[name]),
            )
        )
    return results


def _counts(speculator: Speculator | None) -> tuple[int, int, int, int]:
    assert speculator is not None
    counts = speculator.counts
    return counts.tokens, counts.steps, counts.guesses, counts.accepted


def _rate(llm: LLM, options: SpecBenchOptions, batch_size: int, speculator: Speculator | None) -> float:
    """Decode tokens per second over all prompts, `batch_size` at a time, after every request has its first token."""
    llm.loop.speculator = speculator
    params = SamplingParams(
        max_tokens=options.output_tokens,
        temperature=options.temperature,
        repetition_penalty=1.0,
        ignore_eos=True,
        seed=0,
    )
    tokens, seconds = 0, 0.0
    for start in range(0, len(options.prompts), batch_size):
        _, took, count = timed_generation(llm, options.prompts[start : start + batch_size], params)
        seconds += took
        tokens += count
    return tokens / seconds if seconds > 0 else 0.0


def as_table(results: Sequence[SpecBenchResult]) -> str:
    """The results as a text table."""
    lines = ["drafter      batch  tokens/step  accepted   decode tok/s   speed-up"]
    for result in results:
        lines.append(
            f"{result.drafter:<12} {result.batch_size:5d}  {result.tokens_per_step:11.2f}  {result.accepted:8.2f}  "
            f"{result.decode_tokens_per_s:13.1f}  {result.speedup:8.2f}x"
        )
    return "\n".join(lines)


def as_json(results: Sequence[SpecBenchResult]) -> list[dict[str, object]]:
    """The results as plain values for JSON."""
    return [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(result).items()}
        for result in results
    ]
