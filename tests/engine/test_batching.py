"""Other requests in the batch, the chunks of prompts and preemption never change a token (R7)."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import icc
import numpy as np
import pytest
from icc.runtime.kv.sequence import NO_BLOCK
from sizes import size_of, soak

pytestmark = pytest.mark.slow

GREEDY = icc.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LIMITS = {"max_step_tokens": 64, "max_batch_size": 32}
PAIRS = size_of("r7_pairs")


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 119, n).tolist() for n in (1, 5, 17, 33, 40, 2, 29)]


def limited(llm: icc.LLM, **limits: int) -> icc.LLM:
    """Reduce the step limits or the KV blocks of an engine; returns `llm`."""
    for name, value in limits.items():
        assert value <= getattr(llm.executor, name)
        setattr(llm.executor, name, value)
    llm.loop.reset()
    return llm


def small(llm: icc.LLM) -> icc.LLM:
    return limited(llm, max_step_tokens=24, max_batch_size=5)


def alone(engine: Any, **load: Any) -> list[tuple[int, ...]]:
    with icc.load(engine, **load) as llm:
        return [llm.generate([p], GREEDY)[0].token_ids for p in prompts()]


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("gemma2", "rtn4"),
        *soak(("mixtral", "none"), ("llama", "none"), ("llama", "rtn4"), ("mixtral", "rtn4"), ("gemma2", "none")),
    ],
)
def test_batch_mates_change_nothing(name: str, quant: str, compiled: Callable[..., Any]) -> None:
    engine = compiled(name, quant=quant, **LIMITS).engine
    expected = alone(engine, threads=1)
    with small(icc.load(engine, threads=2)) as llm:
        together = [c.token_ids for c in llm.generate(prompts(), GREEDY)]
    assert together == expected


def test_preemption_changes_nothing(compiled: Callable[..., Any]) -> None:
    engine = compiled("llama", **LIMITS).engine
    expected = alone(engine)
    from icc.runtime.format.load import open_engine

    block = open_engine(engine).program.kv.groups[0].block_bytes()
    with small(icc.load(engine, kv_bytes=5 * block)) as llm:  # one sequence of full length and a little more
        assert [c.token_ids for c in llm.generate(prompts(), GREEDY)] == expected


def test_logits_do_not_depend_on_how_the_text_is_cut(compiled: Callable[..., Any]) -> None:
    ids = prompts()[4]
    found = []
    engine = compiled("llama", quant="rtn4", **LIMITS).engine
    for step in (1, 7, 64):
        with limited(icc.load(engine), max_batch_size=1, max_step_tokens=step) as llm:
            found.append(llm.logits(ids))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_the_same_request_has_the_same_bits(compiled: Callable[..., Any]) -> None:
    """R7: alone, and in batches of 2 to 32 with random neighbours, chunks, prefix hits and too little memory."""
    source, rng = random.Random(7), np.random.default_rng(7)
    shared = rng.integers(3, 119, 40).tolist()
    asked = []
    for number in range(40):
        tokens = shared[: source.choice([0, 16, 25, 33])] + rng.integers(3, 119, source.randrange(1, 12)).tolist()
        temperature = source.choice([0.0, 0.9])
        params = icc.SamplingParams(
            max_tokens=source.randrange(1, 40), temperature=temperature, seed=number, logprobs=3, ignore_eos=True
        )
        asked.append((tokens, params))
    pairs = hits = preemptions = 0
    sizes = set()
    with icc.load(compiled("llama", quant="rtn4", **LIMITS).engine, threads=1) as llm:
        [group] = llm.executor.groups
        expected = [bits(llm.generate([tokens], params)[0]) for tokens, params in asked]
        while pairs < PAIRS:
            size = source.randrange(2, 33)
            if source.random() < 0.6:  # else the prefix cache is kept
                batch = source.randrange(1, 33)
                preemptions += llm.loop.scheduler.num_preemptions
                executor = llm.executor
                executor.max_batch_size, executor.max_step_tokens = batch, source.randrange(batch, 65)
                executor.groups = (replace(group, num_blocks=source.choice([group.num_blocks, 6, 9, 14])),)
                llm.loop.reset()
            chosen = source.sample(range(len(asked)), size)
            generations = [llm.loop.add(*asked[number])[0] for number in chosen]
            for generation in source.sample(generations, size // 8):  # some are cancelled in the middle
                llm.loop.step()
                llm.loop.end(generation)
            while llm.loop.has_work():
                llm.loop.step()
                scheduler = llm.loop.scheduler
                if source.random() < 0.1 and scheduler.num_running:
                    scheduler.queues.preempt(source.choice(scheduler.queues.running))
            hits += sum(bool(generation.num_cached_tokens) for generation in generations)
            for number, generation in zip(chosen, generations, strict=True):
                if generation.finish_reason != "abort":
                    assert bits(generation.completion()) == expected[number], (number, size)
                    pairs += 1
            sizes.add(size)
    assert hits > pairs / 20 and preemptions > 5 and max(sizes) - min(sizes) > 15


def bits(completion: Any) -> tuple[Any, ...]:
    """Ids, and log-probabilities to the last bit."""
    entries = [(entry.token_id, entry.logprob.hex(), entry.top) for entry in completion.logprobs]
    return completion.token_ids, completion.text, completion.finish_reason, entries


class Poison:
    """Sets every bit of KV blocks before each step: NaN in every cache type (and in the scales of int8).

    Free blocks are poisoned before each step, so that a block is full of NaN when a request gets it; the blocks of one
    running request are poisoned once, so that it fails.
    """

    def __init__(self, llm: icc.LLM) -> None:
        self.llm, self.step = llm, llm.executor.step_greedy
        self.victim: int | None = None
        self.zeroed = 0
        llm.executor.step_greedy = self  # type: ignore[method-assign]

    def __call__(self, batch: Any) -> list[int]:
        for number, group in enumerate(self.llm.loop.scheduler.kv.groups):
            self.fill(number, group.pool._free)
        started = [sequence for sequence in batch.sequences if sequence.start]
        if self.victim is None and len(started) > 2:
            self.victim = started[1].request_id
            for number, table in enumerate(started[1].block_tables):
                self.fill(number, [block for block in table if block != NO_BLOCK])
        zeros = [(number, block) for number, upkeep in enumerate(batch.upkeep) for block in upkeep.zeros]
        # not zero yet: the step zeroes them. Blocks freed before the request failed may not be poisoned
        assert all(any(self.read(number, block)) for number, block in zeros if not number)
        tokens = self.step(batch)
        for number, block in zeros:
            written = {block for sequence in batch.sequences for block in sequence.block_tables[number]}
            self.zeroed += 1
            assert block in written or not any(self.read(number, block))
        return tokens

    def places(self, number: int, block: int) -> list[tuple[int, int]]:
        """(address, bytes) of a block in every layer of its group."""
        device = self.llm.executor.device
        return [(device._kv.address + offset, nbytes) for offset, nbytes in device.cache.block_places(number, block)]

    def read(self, number: int, block: int) -> bytes:
        """A block's memory in all layers."""
        return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in self.places(number, block))

    def fill(self, number: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            for address, nbytes in self.places(number, block):
                ctypes.memset(address, 0xFF, nbytes)


@pytest.mark.parametrize(("name", "option"), [("llama", {"kv_cache": "int8"}), *soak(("gemma2", {"quant": "none"}))])
def test_what_a_block_held_before_changes_nothing(
    name: str, option: dict[str, str], compiled: Callable[..., Any]
) -> None:
    """R6: kernels never compute with the old content of a block, not even times zero, even if a request failed."""
    engine = compiled(name, **option, **LIMITS).engine
    expected = alone(engine)
    with small(icc.load(engine)) as llm:
        poison = Poison(llm)
        first = llm.generate(prompts(), GREEDY)
        others = [(c.token_ids, ids) for c, ids in zip(first, expected, strict=True) if c.finish_reason != "error"]
        assert poison.zeroed and poison.victim is not None and len(others) == len(expected) - 1
        assert all(found == ids for found, ids in others)
        assert [c.token_ids for c in llm.generate(prompts(), GREEDY)] == expected
