"""Engines with recurrent states: in chunks, in batches, preempted, with guesses, and from checkpoints of states."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import icc
import numpy as np
import pytest
from icc.runtime.batch.scheduled import Draft, ScheduledBatch, ScheduledSequence
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.llm import LLM
from icc.runtime.speculate.speculator import Speculator
from planted_drafter import PlantedDrafter
from sizes import soak

pytestmark = pytest.mark.slow

NAMES = [
    "qwen3_next-delta_rule",
    *soak("lfm2-short_convolutions", "kimi_linear-decay_per_row", "bamba-state_space", "jamba-selective_scan"),
    *soak("recurrent_gemma-linear_recurrence", "rwkv-shifted_tokens", "xlstm-matrix_memory"),
    *soak("qwen3_next-delta_rule bf16", "kimi_linear-decay_per_row bf16", "jamba-selective_scan bf16"),
]
NEW = 40
GREEDY = icc.SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
TOLERANCE = {"f32": 5e-5, "bf16": 1e-2}  # by --state-cache, relative to the largest logit


@pytest.fixture(params=[*NAMES, "deepseek_v32-picked_tokens"])  # an index has no state, but its own cache
def made(request: pytest.FixtureRequest, compiled: Callable[..., Any]) -> Any:
    """Engine, checkpoint and oracle: shared by all tests here."""
    name, _, kept = request.param.partition(" ")
    options = {"state_cache": kept} if kept else {}
    return compiled(name, max_step_tokens=48, max_batch_size=4, **options)


def kept_as(llm: LLM) -> str:
    return llm.engine.program.kv.groups[-1].dtype


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    long = random.integers(3, 119, 75).tolist()
    return [long, [*long[:70], *random.integers(3, 119, 9).tolist()], long[:30], random.integers(3, 119, 33).tolist()]


def poison(llm: LLM) -> None:
    """From now on, fill every free block with NaN before each step."""
    step, device = llm.executor.step_greedy, llm.executor.device

    def poisoned(batch: Any) -> np.ndarray:
        for number, group in enumerate(llm.loop.scheduler.kv.groups):
            for block in group.pool._free:
                for offset, nbytes in device.cache.block_places(number, block):
                    ctypes.memset(device._kv.address + offset, 0xFF, nbytes)
        return step(batch)

    llm.executor.step_greedy = llm.executor.step = poisoned  # type: ignore[method-assign]


def generate(llm: LLM, preempt_every: int = 0) -> list[Any]:
    generations = [llm.loop.add(prompt, GREEDY)[0] for prompt in prompts()]
    scheduler, steps = llm.loop.scheduler, 0
    while llm.loop.has_work():
        llm.loop.step()
        steps += 1
        if preempt_every and steps % preempt_every == 0 and scheduler.num_running > 1:
            scheduler.queues.preempt(scheduler.queues.running[-1])
    scheduler.check()
    assert scheduler.kv.is_idle
    return generations


def tokens_of(generations: list[Any]) -> list[list[int]]:
    return [list(generation.token_ids) for generation in generations]


def test_tokens_are_the_models_however_they_come_about(made: Any, tiny: Any) -> None:
    engine, _, oracle = made
    with icc.load(engine, threads=2) as llm:
        poison(llm)
        found = tokens_of(generate(llm))
        for prompt, tokens in zip(prompts(), found, strict=True):
            logits = tiny.reference_logits(oracle, [*prompt, *tokens]).numpy()[len(prompt) - 1 : -1]
            lost = logits.max(axis=1) - logits[np.arange(NEW), tokens]
            if kept_as(llm) == "f32":
                assert lost.max() < 1e-3  # ties within rounding
            else:  # two experts may be closer than the rounding, and the other is chosen: 1 in 160 for Kimi Linear
                assert np.mean(lost < 1e-2 * np.abs(logits).max()) > 0.95
        again = generate(llm)  # from the checkpoints of states that exist
        assert tokens_of(again) == found and all(g.num_cached_tokens >= 32 for g in again if len(g.prompt) > 32)
        assert tokens_of(generate(llm, preempt_every=7)) == found
        assert llm.loop.scheduler.num_preemptions > 3
        branches = llm.loop.add(prompts()[0], icc.SamplingParams(max_tokens=5, n=3, temperature=0.0, ignore_eos=True))
        while llm.loop.has_work():
            llm.loop.step()
        assert tokens_of(branches) == [found[0][:5]] * 3
        truth = {tuple(prompt): tokens for prompt, tokens in zip(prompts(), found, strict=True)}
        llm.loop.reset()
        llm.loop.speculator = Speculator(PlantedDrafter(truth, branched), adaptive=False)
        assert tokens_of(generate(llm, preempt_every=9)) == found
        assert llm.loop.speculator.counts.accepted >= NEW


def branched(wrong: int, right: int, then: int) -> Draft:
    """A tree of guesses: beside a wrong guess, the right one, followed by `then` and that by a wrong one."""
    return Draft((right, wrong, then, wrong), (-1, -1, 0, 2))


def test_any_split_gives_the_same_bits(made: Any, tiny: Any) -> None:
    engine, _, oracle = made
    ids = np.random.default_rng(5).integers(3, 119, 70).tolist()
    expected = tiny.reference_logits(oracle, ids).numpy()
    with icc.load(engine, threads=2) as llm:
        device = llm.executor.device

        def split(ends: list[int]) -> np.ndarray:
            ctypes.memset(device._kv.address, 0xFF, device.cache.nbytes)
            tables = tuple(tuple(range(3)) for _ in llm.executor.groups)
            rows, start = [], 0
            for end in ends:
                part = ScheduledSequence(0, tuple(ids[start:end]), start, tables, end - start)
                rows.append(llm.executor.step(ScheduledBatch((part,))).copy())
                start = end
            return np.concatenate(rows)

        whole = split([33, 70])
        assert np.abs(whole - expected).max() / np.abs(expected).max() < TOLERANCE[kept_as(llm)]
        for ends in ([*range(1, 71)], [1, 3, 32, 33, 65, 70], [31, 32, 64, 70]):
            assert np.array_equal(split(ends).view(np.int32), whole.view(np.int32)), ends


def alone(llm: LLM, prompt: list[int], params: icc.SamplingParams) -> Any:
    [generation] = llm.loop.add(prompt, params)
    while llm.loop.has_work():
        llm.loop.step()
    return generation


def test_a_chat_computes_only_its_new_tokens(made: Any) -> None:
    """Ten turns, each the text so far and more: less than a block is computed again, bit-equal to a cold run."""
    engine, _, _ = made
    random = np.random.default_rng(7)
    text, sure = random.integers(3, 119, 40).tolist(), icc.SamplingParams(max_tokens=6, temperature=0.0, logprobs=0)
    with icc.load(engine, threads=2) as llm, icc.load(engine, threads=1) as cold:
        for _ in range(10):
            before = len(text)
            text += random.integers(3, 119, 11).tolist()
            warm, first = (alone(one, text, sure) for one in (llm, cold))
            cold.loop.reset()
            assert first.num_cached_tokens == 0
            if before > 40:
                assert warm.num_cached_tokens > before - 1 - 32
            assert tokens_of([warm]) == tokens_of([first]) and warm.logprobs == first.logprobs
            text += warm.token_ids
        system = [*random.integers(3, 119, 40).tolist(), 2]  # ends as the model's own turns do
        for cached in (0, 32):
            talk = [*system, *random.integers(3, 119, 50).tolist()]
            warm, first = (alone(one, talk, sure) for one in (llm, cold))
            cold.loop.reset()
            assert warm.num_cached_tokens == cached
            assert tokens_of([warm]) == tokens_of([first]) and warm.logprobs == first.logprobs


@pytest.mark.parametrize("made", NAMES, indirect=True)
def test_inspect_shows_the_states(made: Any) -> None:
    facts: Any = describe_engine(made.engine)["kv_cache"]
    *paged, states = facts["groups"]  # models of recurrences alone have no paged groups
    assert states["keeps"] == "the state, and 2 checkpoints per sequence"
    assert states["bytes_per_token"] == 0 and facts["bytes_per_token"] == sum(g["bytes_per_token"] for g in paged)
    with icc.load(made.engine) as llm:
        *_, group = llm.executor.groups
        assert states["bytes_full_batch"] == group.num_blocks * states["bytes_per_state"]
        assert llm.executor.device.cache.nbytes == facts["bytes_full_batch"]
