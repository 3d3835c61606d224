"""The cost of a verify step, and the gain of speculation at a given acceptance rate, on any engine.

    python benchmarks/spec_replay.py ENGINE --accept 0.7 --guesses 15 --threads 2

The drafter replays the tokens of plain decoding, each guess right with the given probability, so that neither a trained
drafter nor a trained model is needed: it is meant for engines with random weights, and only for benchmarks.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence

import icc
import numpy as np
from icc.runtime.batch.scheduled import Draft, ScheduledBatch, ScheduledSequence
from icc.runtime.batch.tables import plain_tables
from icc.runtime.executor.base import Executor
from icc.runtime.llm import LLM
from icc.runtime.speculate.drafter import Drafter, Proposal, Wish
from icc.runtime.speculate.speculator import Speculator


class Replay(Drafter):
    """A drafter of chains from known continuations, each guess right with probability `rate`."""

    name = "replay"

    def __init__(self, truth: Mapping[tuple[int, ...], Sequence[int]], rate: float, length: int) -> None:
        self.first_rate = rate
        self._truth, self._length, self._source = truth, length, random.Random(0)

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        found: dict[int, Proposal] = {}
        for wish in wishes:
            done = len(wish.generation.token_ids)
            known = self._truth[wish.generation.prompt][done : done + self._length]
            guesses = [t if self._source.random() < self.first_rate else (t + 1) % 1000 for t in known]
            if guesses:
                chances = tuple(self.first_rate ** (depth + 1) for depth in range(len(guesses)))
                found[wish.generation.request_id] = Proposal(Draft.chain(guesses), chances)
        return found


def step_seconds(executor: Executor, tokens: int, context: int, rounds: int) -> float:
    """The median seconds of a step that verifies `tokens` - 1 guesses after `context` tokens."""
    tables = plain_tables(executor.groups, context + tokens)
    for start in range(0, context, executor.max_step_tokens):
        part = min(executor.max_step_tokens, context - start)
        executor.step(ScheduledBatch((ScheduledSequence(1, (1,) * part, start, tables, 0),)))
    tree = Draft((2,) * (tokens - 1), tuple((i - 1) // 2 for i in range(tokens - 1))) if tokens > 1 else None
    batch = ScheduledBatch((ScheduledSequence(1, (1,) + (2,) * (tokens - 1), context, tables, tokens, tree),))
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        executor.step(batch)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def rate(llm: LLM, prompt: list[int], tokens: int, speculator: Speculator | None) -> tuple[float, tuple[int, ...]]:
    """Decode tokens per second of one request, and its tokens."""
    llm.loop.speculator = speculator
    params = icc.SamplingParams(max_tokens=tokens, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
    [completion] = llm.generate([prompt], params)
    timing = completion.timing
    return (tokens - 1) / (timing.total - timing.ttft), completion.token_ids


def main() -> None:
    """Parse the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--accept", type=float, default=0.7, help="probability that a guess is right")
    parser.add_argument("--guesses", type=int, default=15, help="guesses per step")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args()
    with icc.load(chosen.engine, threads=chosen.threads, spec="none") as llm:
        plain = step_seconds(llm.executor, 1, chosen.context, 9)
        for tokens in (2, 4, 8, 16):
            found = step_seconds(llm.executor, tokens, chosen.context, 5)
            print(f"verify {tokens:2d} tokens: {found * 1e3:7.2f} ms, {found / plain:.2f} plain steps")
        prompt = np.random.default_rng(0).integers(0, 1000, chosen.context).tolist()
        _, truth = rate(llm, prompt, chosen.tokens, None)
        gains = []
        for _ in range(chosen.rounds):
            drafter = Replay({tuple(prompt): truth}, chosen.accept, chosen.guesses)
            speculator = Speculator(drafter)
            alone, _ = rate(llm, prompt, chosen.tokens, None)
            together, tokens = rate(llm, prompt, chosen.tokens, speculator)
            assert tokens == truth, "speculation changed the tokens"
            gains.append(together / alone)
            print(
                f"accept {chosen.accept}: {together:.1f} tok/s against {alone:.1f}, {gains[-1]:.2f}x, "
                f"{speculator.counts.tokens_per_step:.2f} tokens per step"
            )
        print(f"speed-up {statistics.median(gains):.2f}x")


if __name__ == "__main__":
    main()
