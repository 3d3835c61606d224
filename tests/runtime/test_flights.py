"""Several steps are under way in the stages of a pipeline: stages overlap, and no request's tokens change."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from icc import SamplingParams
from icc.runtime.batch.scheduled import ScheduledBatch
from icc.runtime.format.manifest import Manifest
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.policy import CachePolicy, Window
from icc.runtime.loop.engine_loop import EngineLoop
from icc.runtime.loop.fake import FakeExecutor, FakePipeline, context_hash
from icc.runtime.requests.generation import Generation
from icc.runtime.speculate.speculator import Speculator
from oracle_drafters import Oracle

VOCAB = 64
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
MakeManifest = Callable[..., Manifest]


@pytest.fixture
def make_loop(toy_manifest: MakeManifest) -> Callable[..., EngineLoop]:
    def make(kind: type[FakeExecutor] = FakePipeline, speculator: Speculator | None = None, **more: Any) -> EngineLoop:
        options = {"vocab_size": VOCAB, "rule": context_hash, "max_step_tokens": 256, "num_blocks": 200, **more}
        manifest = toy_manifest(vocab_size=VOCAB, max_seq_len=256, eos_token_ids=[VOCAB])
        return EngineLoop(manifest, kind(**options), None, speculator)

    return make


def run(loop: EngineLoop) -> None:
    while loop.has_work():
        loop.step()
        loop.scheduler.check()


def expected(prompt: list[int], count: int = 12) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(context_hash(tokens, VOCAB))
    return tokens[len(prompt) :]


def pipeline(loop: EngineLoop) -> FakePipeline:
    assert isinstance(loop.executor, FakePipeline)
    return loop.executor


def overlaps(loop: EngineLoop) -> int:
    """How often the first stage began a step before the second stage had ended the previous one."""
    events = pipeline(loop).events
    ended = {number: place for place, (stage, number) in enumerate(events) if stage == 1}
    return sum(stage == 0 and number > 0 and ended[number - 1] > place for place, (stage, number) in enumerate(events))


def parts(batch: ScheduledBatch) -> set[int]:
    return {sequence.request_id for sequence in batch.sequences}


def test_the_first_stage_begins_a_step_before_the_second_ended_the_one_before(make_loop: Any) -> None:
    """Eight decoding requests: two halves alternate."""
    loop = make_loop()
    prompts = [[7, n] for n in range(8)]
    answers = [loop.add(prompt, GREEDY)[0] for prompt in prompts]
    run(loop)
    assert [answer.token_ids for answer in answers] == [expected(prompt) for prompt in prompts]
    executor = pipeline(loop)
    assert executor.most_under_way == 2
    assert overlaps(loop) > 0.8 * len(executor.batches)
    decoding = [batch for batch in executor.batches if batch.num_tokens == len(batch.sequences)]
    pairs = list(itertools.pairwise(decoding[4:-4]))
    assert pairs and all(len(one.sequences) == 4 and not parts(one) & parts(two) for one, two in pairs)


def test_requests_that_come_one_by_one_are_shared_evenly(make_loop: Any) -> None:
    """One runs alone, then seven arrive: steps soon have four requests each."""
    loop = make_loop()
    long = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    answers = [loop.add([9], long)[0]]
    for _ in range(5):
        loop.step()
    prompts = [[9], *([3, n] for n in range(7))]
    answers += [loop.add(prompt, long)[0] for prompt in prompts[1:]]
    run(loop)
    assert [answer.token_ids for answer in answers] == [expected(prompt, 60) for prompt in prompts]
    sizes = [len(batch.sequences) for batch in pipeline(loop).batches]
    assert sizes[20:60] == [4] * 40, sizes


def test_the_chunks_of_a_prompt_overlap(make_loop: Any) -> None:
    """A prompt of 200 tokens: no step waits for the previous chunk, and each reads the KV of earlier ones."""
    loop = make_loop()
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(200)]
    [answer] = loop.add(prompt, GREEDY)
    run(loop)
    assert answer.token_ids == expected(prompt)
    chunks = [batch.num_tokens for batch in pipeline(loop).batches if batch.num_tokens > 1]
    assert chunks == [64, 64, 64, 8] and overlaps(loop) == 3  # then a single request decodes


@pytest.mark.parametrize("more", [(), (Window(5),)], ids=["all", "window"])
@pytest.mark.parametrize("flights", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_and_goes_changes_no_token(
    make_loop: Any, flights: int, seed: int, more: tuple[CachePolicy, ...]
) -> None:
    """Few blocks, so that some requests are preempted; common prefixes; some are cancelled in the middle of a step."""
    source = random.Random(seed)
    groups = [GroupConfig(40, 4, policy=policy) for policy in more]
    sizes = {"num_blocks": 28, "max_batch_size": 6, "max_step_tokens": 80, "max_logit_rows": 80}
    loop = make_loop(flights=flights, more_groups=groups, **sizes)
    answers: list[tuple[list[int], Generation]] = []
    for _ in range(300):
        if source.random() < 0.25 and len(answers) < 40:
            prompt = [source.randrange(3)] * source.randrange(1, 30)
            prompt += [source.randrange(VOCAB)] * source.randrange(1, 40)
            answers.append((prompt, loop.add(prompt, GREEDY)[0]))
        if answers and source.random() < 0.03:
            loop.end(source.choice(answers)[1])
        loop.step()
        loop.scheduler.check()
    run(loop)
    assert pipeline(loop).most_under_way == flights
    for prompt, answer in answers:
        wanted = expected(prompt)
        assert answer.token_ids == wanted[: len(answer.token_ids)]
        assert answer.finish_reason == "abort" or answer.token_ids == wanted
    assert not loop.scheduler.under_way and loop.scheduler.num_preemptions


def test_scores_of_every_token_come_in_order(make_loop: Any) -> None:
    """Chunks of a scored text are under way together; their logits are those of one step at a time."""
    tokens = [random.Random(2).randrange(VOCAB) for _ in range(150)]
    found = []
    for kind in (FakeExecutor, FakePipeline):
        loop = make_loop(kind, max_logit_rows=64)
        score, _ = loop.add_score(tokens), loop.add([5, 6], GREEDY)
        run(loop)
        found.append(np.concatenate(score.take()))
    assert found[0].shape == (150, VOCAB) and np.array_equal(*found) and pipeline(loop).most_under_way == 2


def test_a_stage_that_fails_ends_the_request_at_fault(make_loop: Any) -> None:
    """All requests whose steps were under way start again; only the one that fails alone ends with an error."""
    loop = make_loop()
    executor, faults = pipeline(loop), list[Exception]()
    loop.on_fault = faults.append
    step = executor.step

    def fails(batch: ScheduledBatch) -> np.ndarray:
        if any(sequence.token_ids[0] == 33 and not sequence.start for sequence in batch.sequences):
            raise OSError("the second stage failed")
        return step(batch)

    executor.step = fails  # type: ignore[method-assign]
    prompts = [[1, 2], [33, 2], [3, 4], [5, 6]]
    answers = [loop.add(prompt, GREEDY)[0] for prompt in prompts]
    run(loop)
    assert [answer.finish_reason for answer in answers] == ["length", "error", "length", "length"]
    assert [a.token_ids for a in answers if a is not answers[1]] == [expected(p) for p in prompts if p[0] != 33]
    assert faults and not loop.scheduler.under_way


def test_a_stage_that_is_dead_ends_all_requests(make_loop: Any) -> None:
    loop = make_loop()
    answers = [loop.add([7, n], GREEDY)[0] for n in range(6)]
    for _ in range(4):
        loop.step()

    def dead(batch: ScheduledBatch) -> np.ndarray:
        raise OSError("a stage is gone")

    pipeline(loop).step = dead  # type: ignore[method-assign]
    with pytest.raises(OSError, match="a stage is gone"):
        run(loop)
    assert {answer.finish_reason for answer in answers} == {"error"} and not loop.has_work()


def test_guesses_and_beams_have_one_step_under_way(make_loop: Any) -> None:
    """Their next step needs the tokens of this one. The tokens are those without a pipeline."""
    loop = make_loop(speculator=Speculator(Oracle(expected([7, 1], 40)), adaptive=False))
    [answer] = loop.add([7, 1], GREEDY)
    run(loop)
    assert answer.token_ids == expected([7, 1]) and pipeline(loop).most_under_way == 1
    found = []
    for kind in (FakeExecutor, FakePipeline):
        loop = make_loop(kind)
        answers = loop.add([7, 1], SamplingParams(max_tokens=6, n=2, beams=3, temperature=0))
        others = [loop.add([8, n], GREEDY)[0] for n in range(4)]
        run(loop)
        found.append([answer.token_ids for answer in (*answers, *others)])
    assert found[0] == found[1]
