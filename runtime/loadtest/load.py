"""Load: requests at times that do not depend on the answers (open loop), or a fixed number at a time (closed loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from .endpoint import Endpoint, Trace

# short words, about one token each in any tokenizer
_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so up said what its
about than into them can only other time new some could these two may first then do any like my now over such
our man me even most made after also did many off before must well back through years much where your way down
should because long each
""".split()


@dataclass(frozen=True)
class Mix:
    """Lengths of prompts and answers in tokens, drawn uniformly from the ranges; the first `shared_tokens` tokens of
    all prompts are the same."""

    prompt_tokens: tuple[int, int] = (256, 256)
    output_tokens: tuple[int, int] = (64, 64)
    shared_tokens: int = 0


@dataclass(frozen=True)
class Level:
    """One load. rate: requests per second, in bursts of `burst` (1 is a Poisson process), whatever the server does; if
    rate is 0, `concurrency` requests at a time."""

    rate: float = 0.0
    concurrency: int = 0
    burst: int = 1

    @property
    def name(self) -> str:
        """A title of the load, such as "4 at a time" or "2.5/s in bursts of 8"."""
        if not self.rate:
            return f"{self.concurrency} at a time"
        return f"{self.rate:g}/s" + (f" in bursts of {self.burst}" if self.burst > 1 else "")


class PromptMaker:
    """Makes prompts of wanted lengths. tokens_per_word: of the server's tokenizer."""

    def __init__(self, mix: Mix, seed: int, tokens_per_word: float) -> None:
        self._mix, self._random, self._ratio = mix, np.random.default_rng(seed), tokens_per_word
        self._shared = self._words(np.random.default_rng(12345), mix.shared_tokens)

    def draw(self) -> tuple[str, int]:
        """A random prompt, and the number of tokens to ask for."""
        low, high = self._mix.prompt_tokens
        count = int(self._random.integers(low, high + 1))
        own = self._words(self._random, max(count - self._mix.shared_tokens, 1))
        output = int(self._random.integers(self._mix.output_tokens[0], self._mix.output_tokens[1] + 1))
        return " ".join([*self._shared, *own]), output

    def _words(self, random: np.random.Generator, tokens: int) -> list[str]:
        count = round(tokens / self._ratio)
        return [_WORDS[index] for index in random.integers(0, len(_WORDS), count)]


async def tokens_per_word(endpoint: Endpoint) -> float:
    """Ask the server for a text of known words: its tokens per word, 1 if it does not report its usage.

    The requests also warm the server up and show which fields it refuses.
    """
    counts = []
    for words in (40, 140):
        text = " ".join(_WORDS[i % len(_WORDS)] for i in range(words))
        trace = await endpoint.ask(text, 2, time.monotonic())
        while endpoint.leave_out(trace):
            trace = await endpoint.ask(text, 2, time.monotonic())
        if not trace.ok:
            raise OSError(f"the server does not answer: {trace.error or trace.status}")
        counts.append(trace.prompt_tokens)
    return max((counts[1] - counts[0]) / 100, 0.1) if any(counts) else 1.0


async def run_level(
    endpoint: Endpoint,
    level: Level,
    prompts: PromptMaker,
    requests: int,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> list[Trace]:
    """Run all requests of one load; their traces. progress: called after every answer with a text, the number done and
    the total."""
    drawn = [prompts.draw() for _ in range(requests)]
    done = 0

    async def ask(prompt: str, output: int, due: float) -> Trace:
        nonlocal done
        trace = await endpoint.ask(prompt, output, due)
        done += 1
        progress("", done, requests)
        return trace

    progress("", 0, requests)
    if not level.rate:
        return await _closed(ask, level.concurrency, drawn)
    gaps = np.random.default_rng(seed).exponential(level.burst / level.rate, -(-requests // level.burst))
    begin = time.monotonic()
    due = np.repeat(np.cumsum(gaps) - gaps[0], level.burst)[:requests] + begin
    tasks = []
    for (prompt, output), when in zip(drawn, due.tolist(), strict=True):
        await asyncio.sleep(max(when - time.monotonic(), 0))
        tasks.append(asyncio.create_task(ask(prompt, output, when)))
    return list(await asyncio.gather(*tasks))


async def _closed(
    ask: Callable[[str, int, float], Awaitable[Trace]], concurrency: int, drawn: list[tuple[str, int]]
) -> list[Trace]:
    waiting, traces = iter(drawn), []

    async def work() -> None:
        for prompt, output in waiting:  # shared by all workers
            traces.append(await ask(prompt, output, time.monotonic()))

    await asyncio.gather(*[work() for _ in range(concurrency)])
    return traces
