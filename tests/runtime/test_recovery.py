"""RELIABILITY R5 and R6: a failure of one request ends that request; all others get their usual tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from icc.runtime.batch.scheduled import Draft, ScheduledBatch
from icc.runtime.format.manifest import Manifest
from icc.runtime.kv.sequence import slot_of
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeDevice, FakeExecutor, FakePipeline, context_hash
from icc.runtime.requests.generation import Generation
from icc.runtime.requests.params import SamplingParams
from icc.runtime.requests.sampler import SampledToken, Sampler
from icc.runtime.requests.trial import Trial
from icc.runtime.scheduler.scheduler import Scheduler
from icc.runtime.speculate.drafter import Proposal
from icc.runtime.speculate.speculator import Speculator
from icc.runtime.tokenizer import Tokenizer

from .test_speculation import Oracle

VOCAB = 258
POISON = 200  # a prompt that begins with this token fails
CANARIES = [[5], [1, 2, 3] * 7, [9] * 12, [1, 2, 3] * 7, [1, 2, 3] * 6 + [8], list(range(30)), [9] * 13]
LIMIT = 14
GREEDY = SamplingParams(max_tokens=LIMIT, ignore_eos=True)


class Broken:
    """Makes an executor fail in each step at whose end a poisoned request has more than `at` tokens."""

    def __init__(self, executor: FakeExecutor, at: int = 0) -> None:
        self.executor, self.step, self.at, self.failures = executor, executor.step, at, 0
        self.cache = executor.caches[0].reshape(-1)
        executor.step = self  # type: ignore[method-assign]

    def __call__(self, batch: ScheduledBatch) -> np.ndarray:
        if any(s.end > self.at and self.first_token(s) == POISON for s in batch.sequences):
            self.failures += 1
            self.cache[[self.slot(s, p) for s in batch.sequences for p in range(s.end)]] = -1
            raise OSError("the device failed")
        return self.step(batch)

    def first_token(self, sequence: Any) -> int:
        return sequence.token_ids[0] if sequence.start == 0 else int(self.cache[self.slot(sequence, 0)])

    def slot(self, sequence: Any, position: int) -> int:
        return slot_of(sequence.block_tables[0], position, self.executor.groups[0].block_size)


MakeLLM = Callable[..., LLM]


@pytest.fixture(params=[FakeExecutor, FakeDevice, FakePipeline])
def make_llm(request: Any, toy_manifest: Callable[..., Manifest], byte_tokenizer_file: Path) -> MakeLLM:
    def make(speculator: Speculator | None = None, **executor: Any) -> LLM:
        options = {"vocab_size": VOCAB, "rule": context_hash, "num_blocks": 200, "max_batch_size": 16}
        options |= {"max_step_tokens": 64, "max_logit_rows": 64}
        tokenizer = Tokenizer(byte_tokenizer_file.read_bytes())
        return LLM(toy_manifest(), request.param(**{**options, **executor}), tokenizer, speculator=speculator)

    return make


def expected(prompt: Collection[int], count: int = LIMIT) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(context_hash(tokens, VOCAB))
    return tokens[len(prompt) :]


def run(llm: LLM, bad: list[list[int]], params: SamplingParams = GREEDY) -> list[Generation]:
    """Run bad prompts between canaries, which must give their usual tokens. Returns the generations of the bad
    prompts."""
    good = [llm.loop.add(prompt, GREEDY)[0] for prompt in CANARIES[:4]]
    wrong = [llm.loop.add(prompt, params)[0] for prompt in bad]
    good += [llm.loop.add(prompt, GREEDY)[0] for prompt in CANARIES[4:]]
    outputs: dict[int, list[int]] = {}
    while llm.loop.has_work():
        for output in llm.loop.step():
            outputs.setdefault(output.request_id, []).append(output.token_id if output.token_id is not None else -1)
    for generation, prompt in zip(good, CANARIES, strict=True):
        assert generation.token_ids == expected(prompt) == outputs[generation.request_id], prompt
        assert generation.finish_reason == "length" and generation.fault is None
        assert "".join(o.text for o in generation.outputs) == "".join(generation.pieces)
    llm.loop.scheduler.check()
    requests = llm.loop.requests
    assert llm.loop.scheduler.kv.is_idle and not requests.live and not requests.trial.running
    return wrong


@pytest.mark.parametrize("at", [0, 20, 33])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_step_that_fails_ends_only_whom_it_fails_on(make_llm: MakeLLM, count: int, at: int) -> None:
    """The step fails in the first chunk of a prompt, in a later one, or during decoding."""
    llm = make_llm()
    faults: list[Exception] = []
    llm.loop.on_fault = faults.append
    broken = Broken(llm.executor, at)  # type: ignore[arg-type]
    wrong = run(llm, [[POISON] + [i] * 29 for i in range(count)])
    for generation in wrong:
        assert generation.finish_reason == "error" and isinstance(generation.fault, OSError)
        assert generation.token_ids == expected(generation.prompt)[: max(at - 29, 0)]
        with pytest.raises(OSError, match="the device failed"):
            generation.completion()
    assert len(faults) == broken.failures <= 2 * 4 * count + 1  # 2 log2(n) steps for each of them


@pytest.mark.parametrize(
    "executor",
    [
        {"max_batch_size": 3, "max_step_tokens": 5, "max_logit_rows": 3, "num_blocks": 16},
        {"max_batch_size": 1, "max_step_tokens": 4, "max_logit_rows": 1},
        {"block_size": 16, "num_blocks": 6},
    ],
)
def test_in_little_memory_and_small_steps_too(make_llm: MakeLLM, executor: dict[str, int]) -> None:
    llm = make_llm(**executor)
    Broken(llm.executor, 25)  # type: ignore[arg-type]
    assert [g.finish_reason for g in run(llm, [[POISON] * 22, [POISON] * 3, [7]])] == ["error", "length", "length"]


def test_who_comes_and_goes_during_a_trial(make_llm: MakeLLM) -> None:
    llm = make_llm()
    Broken(llm.executor)  # type: ignore[arg-type]
    generations = [llm.loop.add(prompt, GREEDY)[0] for prompt in ([POISON], [1], [2], [3])]
    llm.loop.step()
    assert llm.loop.requests.trial.running
    late = llm.loop.add([4], GREEDY)[0]
    llm.loop.end(generations[1])
    llm.loop.end(generations[2])
    while llm.loop.has_work():
        llm.loop.step()
    assert [g.finish_reason for g in [*generations, late]] == ["error", "abort", "abort", "length", "length"]
    assert late.token_ids == expected([4])


def test_a_failure_that_is_gone_ends_nobody(make_llm: MakeLLM) -> None:
    llm = make_llm()
    step, count = llm.executor.step, 0

    def sometimes(batch: ScheduledBatch) -> np.ndarray:
        nonlocal count
        count += len(batch.sequences) > 1
        if len(batch.sequences) > 1 and count % 5 == 4:
            raise OSError("a bit fell over")
        return step(batch)

    llm.executor.step = sometimes  # type: ignore[method-assign]
    assert run(llm, []) == []


def test_a_device_that_has_failed_for_good_is_said_so(make_llm: MakeLLM) -> None:
    llm = make_llm()
    generations = [llm.loop.add(prompt, GREEDY)[0] for prompt in CANARIES]
    llm.loop.step()
    llm.executor.step = lambda batch: (_ for _ in ()).throw(OSError("gone"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="gone"):
        while True:
            llm.loop.step()
    assert all(generation.finish_reason == "error" for generation in generations) and not llm.loop.has_work()


def test_scoring_requests_fail_alone_and_begin_anew(make_llm: MakeLLM) -> None:
    llm = make_llm(max_step_tokens=16, max_logit_rows=16)
    wanted = [llm.logits(prompt) for prompt in ([1, 2] * 20, [3] * 35)]
    Broken(llm.executor, 25)  # type: ignore[arg-type]
    first, wrong, last = [llm.loop.add_score(prompt) for prompt in ([1, 2] * 20, [POISON] * 30, [3] * 35)]
    rows: list[list[np.ndarray]] = [[], []]
    while llm.loop.has_work():
        llm.loop.step()
        for chunks, scores in zip(rows, (first, last), strict=True):
            chunks += scores.take()
    for chunks, logits in zip(rows, wanted, strict=True):
        assert np.array_equal(np.concatenate(chunks), logits)
    with pytest.raises(OSError, match="the device failed"):
        wrong.take()


@pytest.mark.parametrize("method", ["schedule", "update"])
def test_a_scheduler_that_fails_on_one_request(make_llm: MakeLLM, method: str) -> None:
    """The scheduler is recreated, and the request that makes it fail ends."""
    llm = make_llm()
    make = llm.loop.requests._make_scheduler

    def faulty() -> Scheduler:
        scheduler = make()
        real = getattr(scheduler, method)

        def call(*arguments: Any) -> Any:
            if any(request.spec.token_ids[0] == POISON for request in scheduler.queues.requests.values()):
                raise KeyError("a bug")
            return real(*arguments)

        setattr(scheduler, method, call)
        return scheduler

    llm.loop.requests._make_scheduler = faulty
    llm.loop.reset()
    [wrong] = run(llm, [[POISON, 3]])
    assert wrong.finish_reason == "error" and isinstance(wrong.fault, KeyError)


@pytest.mark.parametrize("method", ["drafts", "settle", "observe"])
def test_a_speculator_that_fails_is_left_and_nobody_ends(make_llm: MakeLLM, method: str) -> None:
    speculator = Speculator(Oracle(0.5), adaptive=False)
    llm = make_llm(speculator)
    real = getattr(speculator, method)
    calls = 0

    def faulty(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise ValueError("a bug")
        return real(*arguments)

    setattr(speculator, method, faulty)
    assert [g.finish_reason for g in run(llm, [[7]])] == ["length"]
    assert llm.loop.speculator is None and calls == 5


def test_guesses_that_are_no_tokens_are_not_verified(make_llm: MakeLLM) -> None:
    class Wild(Oracle):
        def propose(self, wishes: Any) -> dict[int, Proposal]:
            return {
                w.generation.request_id: Proposal(Draft.chain([VOCAB if w.generation.request_id % 2 else -1]), (0.9,))
                for w in wishes
            }

    llm = make_llm(Speculator(Wild(0.5), adaptive=False))
    run(llm, [])
    assert all(0 <= t < VOCAB for b in llm.executor.batches for s in b.sequences if s.start for t in s.token_ids[1:])


@pytest.mark.parametrize(
    "draft",
    [Draft((3, 4), (1, -1)), Draft((3, 4), (-1, 1)), Draft((3,), (-2,)), Draft((3, 4), (-1,)), Draft((3,), (-1, 0))],
)
def test_guesses_that_are_no_tree_are_not_verified(make_llm: MakeLLM, draft: Draft) -> None:
    class Wild(Oracle):
        def propose(self, wishes: Any) -> dict[int, Proposal]:
            return {w.generation.request_id: Proposal(draft, (0.9,) * len(draft)) for w in wishes}

    llm = make_llm(Speculator(Wild(0.5), adaptive=False))
    assert all(g.finish_reason == "length" for g in run(llm, [[7]]))
    assert llm.executor.batches and all(s.draft is None for b in llm.executor.batches for s in b.sequences)


def test_guesses_that_are_no_numbers_end_the_drafter(make_llm: MakeLLM) -> None:
    class Wild(Oracle):
        def propose(self, wishes: Any) -> dict[int, Proposal]:
            return {w.generation.request_id: Proposal(Draft.chain(["a"]), (0.9,)) for w in wishes}  # type: ignore[list-item]

    llm = make_llm(Speculator(Wild(0.5), adaptive=False))
    assert all(g.finish_reason == "length" for g in run(llm, [[7]])) and llm.loop.speculator is None


@pytest.mark.parametrize("how", ["raise", "nan", "id", "negative"])
def test_a_sampler_that_fails_ends_its_request(make_llm: MakeLLM, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sampler.sample

    def faulty(self: Sampler, logits: np.ndarray) -> SampledToken | None:
        if self.params.min_tokens != 1:
            return sample(self, logits)
        if how == "raise":
            raise RuntimeError("a bug")
        return {"nan": None, "id": SampledToken(VOCAB), "negative": SampledToken(-1)}[how]

    monkeypatch.setattr(Sampler, "sample", faulty)
    [wrong] = run(make_llm(), [[77]], SamplingParams(max_tokens=9, min_tokens=1))  # min_tokens: the host samples
    assert wrong.finish_reason == "error" and wrong.token_ids == []
    assert isinstance(wrong.fault, RuntimeError) == (how == "raise")


@pytest.mark.parametrize("method", ["allowed", "accept"])
def test_a_grammar_that_fails_ends_its_request(make_llm: MakeLLM, method: str) -> None:
    class Grammar:
        def allowed(self) -> np.ndarray:
            if method == "allowed":
                raise RuntimeError("a bug")
            return np.ones(VOCAB, dtype=bool)

        def accept(self, token_id: int) -> None:
            raise RuntimeError("a bug")

    llm = make_llm()
    [wrong] = llm.loop.add([7], GREEDY, constrain=Grammar)
    run(llm, [])
    assert wrong.finish_reason == "error" and isinstance(wrong.fault, RuntimeError)


def test_what_is_not_a_number_is_zeroed_and_not_cached(make_llm: MakeLLM) -> None:
    """Blocks that another request shares are not zeroed."""
    nan = next(t for t in range(VOCAB) if all(t not in expected(p) and t not in p for p in [*CANARIES, [11] * 13]))
    llm = make_llm(nan_after=nan)
    last = next(i for i in range(VOCAB) if context_hash([*[11] * 12, i], VOCAB) == nan)
    bad = [*[11] * 12, last]

    def zeroed() -> list[int]:
        found = [block for batch in llm.executor.batches for upkeep in batch.upkeep for block in upkeep.zeros]
        llm.executor.batches.clear()
        return found

    for _ in range(2):  # nothing is left of it the second time
        [wrong] = run(llm, [bad])
        assert wrong.finish_reason == "error" and wrong.token_ids == [nan] and wrong.num_cached_tokens == 0
        assert len(set(zeroed())) == 4  # 14 tokens in blocks of 4
    [beside] = llm.loop.add([11] * 13, GREEDY)
    llm.loop.step()
    [wrong] = run(llm, [bad])
    assert wrong.num_cached_tokens == 12 and wrong.finish_reason == "error"
    assert beside.token_ids == expected([11] * 13) and len(zeroed()) == 1


def test_a_trial_finds_every_set_of_culprits() -> None:
    """Exhaustive: all sets of culprits among eight requests; a culprit fails whatever runs beside it."""
    for bits in range(1, 256):
        culprits, trial, found, steps = {i for i in range(8) if bits >> i & 1}, Trial(), set(), 0
        group: list[int] = list(range(8))
        while group:
            steps += 1
            if culprits.intersection(group):
                culprit = trial.failed(group)
                found |= set() if culprit is None else {culprit}
            else:
                for request_id in group:
                    trial.clear(request_id)
                assert trial.group_done
            group = trial.next_group(set(range(8)) - found)
        assert found == culprits and not trial.running and steps <= 15
