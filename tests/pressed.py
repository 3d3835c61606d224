"""Whole engines under pressure: `python pressed.py ENGINE [FIRST_SEED] [RUNS]` runs random workloads and checks all
results.

A run has pools of a drawn size, down to what one sequence needs, host memory or none, a drafter or none, and steps of a
drawn size. Requests arrive, some of them continuations or prefixes of others, with several completions, sampled or
greedy, or scored; any request may be aborted or preempted at any moment. Every free block is filled with NaN before
each step. Checks: every answer has the tokens, and bit-equal log-probabilities, that its prompt has alone in a cold
engine with enough memory; the scheduler's invariants hold after every step; and nothing is left when all requests have
ended.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import icc
import numpy as np
from icc.runtime.batch.scheduled import ScheduledBatch
from icc.runtime.errors import CapacityError
from icc.runtime.executor.player import Player
from icc.runtime.format.load import open_engine
from icc.runtime.format.speculation import DraftTree
from icc.runtime.llm import LLM
from icc.runtime.requests.generation import Generation
from icc.runtime.requests.request import Standing
from icc.runtime.speculate import ngram
from icc.runtime.speculate.choose import choose_speculator
from icc.runtime.speculate.medusa import MedusaDrafter
from icc.runtime.speculate.speculator import Speculator
from msgspec.structs import replace
from planted_drafter import TreeDrafter
from swapping_cpu import SwappingCpu

MOST = 36  # tokens per answer
REQUESTS = 24  # per run


class Cold:
    """The answers and scores of each prompt alone, with an empty cache, each computed once."""

    def __init__(self, engine: Path, threads: int = 1) -> None:
        self.llm = icc.load(engine, threads=threads, spec="none")
        self._answers: dict[Any, list[Generation]] = {}
        self._scores: dict[tuple[int, ...], np.ndarray] = {}

    def answers(self, prompt: tuple[int, ...], params: icc.SamplingParams) -> list[Generation]:
        key = prompt, params.temperature, params.seed, params.ignore_eos, params.n
        if key not in self._answers:
            loop = self.llm.loop
            loop.reset()
            self._answers[key] = loop.add(prompt, params)
            while loop.has_work():
                loop.step()
        return self._answers[key]

    def scores(self, prompt: tuple[int, ...]) -> np.ndarray:
        if prompt not in self._scores:
            self._scores[prompt] = self.llm.logits(list(prompt))
        return self._scores[prompt]


def tree_of(ranks: int, batch: int) -> DraftTree:
    """A tree of two guesses of the first head, and one each of the next two: for heads with random weights the compiler
    would choose a tree without guesses."""
    return DraftTree(batch, [-1, -1, 0, 2], [1, 1, 2, 3], [0, 1, ranks, 2 * ranks], [1, 2, 5, 13], [0.5] * 4, 2.0, 2.0)


class Run:
    """One run; `seen` counts its events by kind."""

    def __init__(self, cold: Cold, path: Path, seed: int) -> None:
        self.cold, self.draw, self.seen = cold, random.Random(seed), Counter[str]()
        engine, draw = open_engine(path), self.draw
        limits, layout = engine.manifest.limits, engine.program.kv
        least, most = (layout.blocks_needed(limits, count) for count in (1, limits.max_batch_size))
        share = draw.choice((0.0, 0.2, 0.5))
        blocks = [low + int((high - low) * share * draw.random()) for low, high in zip(least, most, strict=True)]
        host = [draw.choice((0, *most, *most)) if draw.random() < 0.8 else 0 for _ in blocks]
        self.device = SwappingCpu(engine, draw.choice((1, 2)), blocks, host)
        executor = Player(self.device)
        executor.max_step_tokens = draw.randint(limits.max_batch_size + 1, executor.max_step_tokens)
        heads = engine.program.section("medusa") is not None
        self.drafter = draw.choice(("none", "ngram", "trees", "trees", *(("medusa",) * 3 if heads else ("ngram",))))
        chosen = "ngram" if self.drafter == "trees" else self.drafter
        speculator = choose_speculator(chosen, engine, executor, lambda *_: executor)
        if speculator is not None:
            speculator.adaptive = draw.random() < 0.2
            if self.drafter == "trees":
                speculator = Speculator(TreeDrafter(self.truth, draw.choice((0.3, 0.8)), seed), adaptive=False)
            if self.drafter == "medusa" and engine.program.speculation is not None:
                always = replace(
                    engine.program.speculation, trees=[tree_of(engine.program.speculation.ranks, limits.max_batch_size)]
                )
                speculator = Speculator(MedusaDrafter(executor, always), adaptive=speculator.adaptive)
        self.llm = LLM(engine.manifest, executor, None, engine, speculator)
        for name in ("step", "step_greedy"):
            setattr(executor, name, self.poisoned(getattr(executor, name)))
        self.vocab = range(3, min(engine.manifest.model.vocab_size, 100))
        self.longest = limits.max_seq_len
        self.live: list[Any] = []
        self.rows: dict[int, list[np.ndarray]] = {}  # logits of scored requests
        self.texts = [self.text(draw.randint(1, self.longest // 2)) for _ in range(3)]

    def text(self, length: int) -> list[int]:
        """Random tokens, or a few repeated ones, which n-grams guess well."""
        if self.draw.random() < 0.5:
            return [self.draw.choice(self.vocab) for _ in range(length)]
        few = [self.draw.choice(self.vocab) for _ in range(5)]
        return [few[i % 5] for i in range(length)]

    def truth(self, generation: Generation) -> Sequence[int]:
        return self.expected(generation).token_ids

    def poisoned(self, step: Callable[[ScheduledBatch], Any]) -> Callable[[ScheduledBatch], Any]:
        def run(batch: ScheduledBatch) -> Any:
            groups = self.llm.loop.scheduler.kv.groups
            for number, (group, upkeep) in enumerate(zip(groups, batch.upkeep, strict=True)):
                kept = {block for block, _ in upkeep.swap_outs}
                kept |= {source // group.block_size for source, _ in upkeep.moves}
                for block in set(group.pool._free) - kept:
                    self.device.poison(number, block)
            return step(batch)

        return run

    # -- what happens ------------------------------------------------------------------------------------------------

    def prompt(self) -> tuple[int, ...]:
        text, draw = self.draw.choice(self.texts), self.draw
        kept = text[: draw.choice((len(text), len(text), draw.randint(1, len(text)), 32, 33))]
        new = self.text(draw.randint(0, 12))
        return tuple([*kept, *new][: self.longest - 2]) or (5,)

    def add(self) -> None:
        draw, prompt, loop = self.draw, self.prompt(), self.llm.loop
        standing = Standing(priority=draw.choice((0, 0, 0, 1)), salt=draw.choice((b"", b"", b"other")))
        if draw.random() < 0.07:
            scores = loop.add_score(prompt, standing)
            self.rows[scores.request_id] = []
            self.live.append(scores)
            return
        temperature = draw.choice((0.0, 0.0, 1.0))
        params = icc.SamplingParams(
            max_tokens=draw.randint(1, MOST), temperature=temperature, seed=draw.randint(0, 1), logprobs=2,
            n=draw.choice((1, 1, 1, 3)), ignore_eos=draw.random() < 0.8,
        )  # fmt: skip
        try:
            self.live += loop.add(prompt, params, standing)
        except CapacityError:
            self.seen["refused"] += 1

    def step(self) -> None:
        loop, draw = self.llm.loop, self.draw
        scheduler = loop.scheduler
        if scheduler.num_running and draw.random() < 0.06:
            scheduler.queues.preempt(draw.choice(scheduler.queues.running))
        loop.step()
        scheduler.check()
        for request in self.live:
            if request.request_id in self.rows:
                self.rows[request.request_id] += [rows.copy() for rows in request.take()]
        if self.live and draw.random() < 0.04:
            loop.end(draw.choice(self.live))
            scheduler.check()
        for request in [request for request in self.live if request.finish_reason is not None]:
            self.live.remove(request)
            self.check(request)

    def check(self, request: Any) -> None:
        """Check that a request's output is what its prompt gives alone, up to where it ended."""
        self.seen[request.finish_reason] += 1
        self.seen["cached"] += request.num_cached_tokens or 0
        assert request.fault is None and request.finish_reason != "error", request.fault
        if request.request_id in self.rows:
            rows = self.rows.pop(request.request_id)
            found = np.concatenate(rows) if rows else np.zeros((0, self.llm.executor.vocab_size), np.float32)
            expected = self.cold.scores(request.prompt)[: len(found)]
            assert request.finish_reason == "abort" or len(found) == len(request.prompt)
            assert np.array_equal(found.view(np.int32), expected.view(np.int32)), "other logits"
            return
        count, expected = len(request.token_ids), self.expected(request)
        assert request.token_ids == expected.token_ids[:count], "other tokens"
        assert request.logprobs == expected.logprobs[:count], "other log-probabilities"
        if request.finish_reason == "stop":
            assert expected.finish_reason == "stop" and count == len(expected.token_ids)
        if request.finish_reason == "length":
            assert count == min(request.params.max_tokens, self.longest - len(request.prompt))
        if self.draw.random() < 0.4:  # later requests may continue this conversation
            self.texts[self.draw.randrange(3)] = [*request.prompt, *request.token_ids][: self.longest - 20]

    def expected(self, request: Generation) -> Generation:
        params = request.params
        whole = icc.SamplingParams(
            max_tokens=MOST, temperature=params.temperature, seed=params.seed, logprobs=2, n=params.n,
            ignore_eos=params.ignore_eos,
        )  # fmt: skip
        return self.cold.answers(request.prompt, whole)[request.index]

    def run(self) -> Counter[str]:
        with self.llm:
            for _ in range(REQUESTS):
                self.add()
                for _ in range(self.draw.choice((0, 0, 1, 3, 12))):
                    self.step()
            steps = 0
            while self.live:
                self.step()
                steps += 1
                assert steps < REQUESTS * 3 * (MOST + self.longest), "no progress"
            scheduler = self.llm.loop.scheduler
            assert scheduler.kv.is_idle and not scheduler.has_work() and not self.llm.loop.has_work()
            for group, config in zip(scheduler.kv.groups, self.llm.executor.groups, strict=True):
                assert group.host.num_free == config.host_blocks, "host memory is lost"
            self.seen["preempted"] += scheduler.num_preemptions
            self.seen["swapped"] += scheduler.num_swaps
            if (speculator := self.llm.loop.speculator) is not None:
                self.seen[f"guesses of {self.drafter}"] += speculator.counts.guesses
                self.seen["accepted"] += speculator.counts.accepted
            elif self.drafter != "none":
                raise AssertionError("the drafter failed")
        return self.seen


def press(engine: Path, first_seed: int, runs: int) -> Counter[str]:
    """Perform `runs` runs; returns the total counts of events. N-grams have one token, because random weights repeat no
    three."""
    cold, seen = Cold(engine), Counter[str]()
    with cold.llm, mock.patch.object(ngram, "GRAM", 1):
        for seed in range(first_seed, first_seed + runs):
            try:
                seen += Run(cold, engine, seed).run()
            except BaseException:
                print(f"seed {seed} of {engine}", file=sys.stderr)
                raise
    return seen


if __name__ == "__main__":
    path, first, count = Path(sys.argv[1]), *map(int, [*sys.argv[2:], "0", "20"][:2])
    print(dict(press(path, first, count)))
