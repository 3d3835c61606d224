"""Speculative decoding over the fake executor: whatever is guessed, every request gets the tokens of plain decoding."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from icc.runtime.engine.manifest import Manifest
from icc.runtime.executor.fake import FakeDevice, FakeExecutor, context_hash
from icc.runtime.llm import LLM
from icc.runtime.params import SamplingParams
from icc.runtime.scheduler.batch import Draft
from icc.runtime.speculate.drafter import Drafter, Proposal, Wish
from icc.runtime.speculate.ledger import MOST_SAVED, OVERHEAD, Account, StepTimes
from icc.runtime.speculate.ngram import NgramDrafter
from icc.runtime.speculate.second_engine import EngineDrafter
from icc.runtime.speculate.speculator import Speculator
from icc.runtime.speculate.verify import Walk, follow
from icc.runtime.tokenizer import Tokenizer

VOCAB = 258
MakeLLM = Callable[..., LLM]


class Oracle(Drafter):
    """Random trees of guesses, of which a share is what the fake model says next."""

    name, first_rate = "oracle", 0.5

    def __init__(self, right: float, seed: int = 0, rule: Callable[..., int] = context_hash) -> None:
        self._source, self._right, self._rule = random.Random(seed), right, rule

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        found = {}
        for wish in wishes:
            prefixes = [[*wish.generation.prompt, *wish.generation.token_ids]]
            guesses: list[int] = []
            parents: list[int] = []
            for _ in range(self._source.randrange(9)):
                parent = self._source.randrange(len(prefixes)) - 1
                right = self._source.random() < self._right
                guess = self._rule(prefixes[parent + 1], VOCAB) if right else self._source.randrange(VOCAB)
                if (parent, guess) not in zip(parents, guesses, strict=True):
                    guesses.append(guess)
                    parents.append(parent)
                    prefixes.append([*prefixes[parent + 1], guess])
            found[wish.generation.request_id] = Proposal(Draft(tuple(guesses), tuple(parents)), (0.5,) * len(guesses))
        return found


@pytest.fixture(params=[FakeExecutor, FakeDevice])
def make_llm(request: Any, toy_manifest: Callable[..., Manifest], byte_tokenizer_file: Path) -> MakeLLM:
    """An LLM over a fake; `drafter` None decodes plainly."""

    def make(drafter: Any = None, adaptive: bool = False, **executor: Any) -> LLM:
        executor = {"vocab_size": VOCAB, "rule": context_hash, "num_blocks": 200, "max_step_tokens": 64, **executor}
        executor.setdefault("max_logit_rows", 64)
        tokenizer = Tokenizer(byte_tokenizer_file.read_bytes())
        speculator = None if drafter is None else Speculator(drafter, adaptive=adaptive)
        return LLM(toy_manifest(), request.param(**executor), tokenizer, speculator=speculator)

    return make


PROMPTS = [[5], [1, 2, 3] * 7, [9] * 12, [1, 2, 3] * 7, [1, 2, 3] * 6 + [8], [200, 100], list(range(30)), [9] * 13]
PARAMS = [SamplingParams(max_tokens=10 + 3 * index) for index in range(len(PROMPTS))]


@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
@pytest.mark.parametrize(
    "executor",
    [
        {},
        {"num_blocks": 16, "max_batch_size": 8, "max_step_tokens": 12, "max_logit_rows": 10},
        {"num_blocks": 60, "block_size": 1, "max_batch_size": 4, "max_step_tokens": 9},
        {"num_blocks": 6, "block_size": 16, "max_batch_size": 4},
    ],
)
def test_tokens_are_those_of_plain_decoding(make_llm: MakeLLM, executor: dict[str, int], right: float) -> None:
    """Greedy, with preemption, chunked prompts, prefix reuse and several trees in a step."""
    plain = make_llm(num_blocks=200).generate(PROMPTS, PARAMS)
    llm = make_llm(Oracle(right), **executor)
    for _ in range(2):  # the second time out of the prefix cache, whose blocks hold moved tokens
        for expected, got in zip(plain, llm.generate(PROMPTS, PARAMS), strict=True):
            assert got == expected
        llm.loop.scheduler.check()
        assert not llm.loop.has_work()
    assert right == 0 or llm.loop.speculator.counts.accepted > 20
    assert llm.executor.batches[-1].num_tokens <= llm.executor.max_step_tokens


def test_seeded_samples_are_those_of_plain_decoding(make_llm: MakeLLM) -> None:
    """Also where the host must sample (penalties), with log-probabilities, min_tokens and several completions."""
    params = [
        SamplingParams(max_tokens=12, temperature=5.0, seed=1, n=2),
        SamplingParams(max_tokens=12, temperature=3.0, seed=2, top_k=5, logprobs=2),
        SamplingParams(max_tokens=12, temperature=4.0, seed=3, frequency_penalty=1.0, min_tokens=4),
    ]
    prompts = [[seed, 1, 2] for seed in range(3)]
    plain = make_llm().generate(prompts, params)
    assert make_llm(Oracle(0.9)).generate(prompts, params) == plain


def counting(tokens: Sequence[int], vocab: int) -> int:
    """a, b, c, ... in bytes."""
    return (tokens[-1] + 1 - 97) % 26 + 97


@pytest.mark.parametrize("length", range(1, 14))
def test_stop_strings_and_limits_are_exact(make_llm: MakeLLM, length: int) -> None:
    """Wherever in a tree the text or the number of tokens ends."""
    llm = make_llm(Oracle(1.0, seed=length, rule=counting), rule=counting)
    cut = SamplingParams(max_tokens=length)
    [text] = llm.generate(["xyz"], cut)
    assert text.text == "abcdefghijklmnop"[:length] and len(text.token_ids) == length
    assert text.finish_reason == "length"
    stop = SamplingParams(max_tokens=40, stop=("abcdefghijklmnop"[length : length + 2],))
    [text] = llm.generate(["xyz"], stop)
    assert (text.text, text.finish_reason) == ("abcdefghijklmnop"[:length], "stop")
    assert len(text.token_ids) == length + 2


def test_an_end_token_inside_a_tree_ends_the_request(make_llm: MakeLLM) -> None:
    params = SamplingParams(max_tokens=40, stop_token_ids=(ord("g"),))
    [got] = make_llm(Oracle(1.0, rule=counting), rule=counting).generate(["xyz"], params)
    assert bytes(got.token_ids) == b"abcdefg" and got.text == "abcdef"


def test_each_token_of_a_step_is_an_output_of_its_own(make_llm: MakeLLM) -> None:
    llm = make_llm(Oracle(1.0, rule=counting), rule=counting)
    outputs = list(llm.outputs("xyz", SamplingParams(max_tokens=20)))
    assert [output.token_id for output in outputs] == list(b"abcdefghijklmnopqrst")
    assert len(llm.executor.batches) < 20
    assert [output.finish_reason for output in outputs] == [None] * 19 + ["length"]


def test_logits_that_are_not_numbers_end_the_request_after_the_good_tokens(make_llm: MakeLLM) -> None:
    llm = make_llm(Oracle(1.0, rule=counting), rule=counting, nan_after=ord("f"))
    [got] = llm.generate(["xyz"], SamplingParams(max_tokens=40))
    assert (bytes(got.token_ids), got.finish_reason) == (b"abcdef", "error")


def periodic(tokens: Sequence[int], vocab: int) -> int:
    """Repeats what is 7 tokens back."""
    return tokens[-7] if len(tokens) >= 7 else 1


def test_prompt_lookup_finds_what_repeats(make_llm: MakeLLM) -> None:
    llm = make_llm(NgramDrafter(), rule=periodic)
    prompt = [10, 11, 12, 13, 14, 15, 16, 10, 11, 12]
    [got] = llm.generate([prompt], SamplingParams(max_tokens=40))
    assert got.token_ids == tuple((prompt[3:10] * 7)[:40])
    assert llm.loop.speculator.counts.accepted > 10


class Owner:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("blocks", [200, 12])
def test_a_second_engine_guesses(make_llm: MakeLLM, blocks: int) -> None:
    """The same model guesses everything right, also where its memory is short; another model does no harm."""
    params = [replace(one, ignore_eos=True) for one in PARAMS]
    plain = make_llm().generate(PROMPTS, params)
    for rule, least in ((context_hash, 50 if blocks == 200 else 5), (counting, 0)):
        executor = FakeExecutor(vocab_size=VOCAB, rule=rule, num_blocks=blocks, max_step_tokens=7, max_batch_size=4)
        owner = Owner()
        llm = make_llm(EngineDrafter(executor, 64, owner))
        assert llm.generate(PROMPTS, params) == plain
        counts = llm.loop.speculator.counts
        assert counts.accepted >= least
        assert least == 0 or counts.accepted == counts.guesses
        drafter = llm.loop.speculator.drafter
        assert drafter._pool.num_available == blocks  # all requests were forgotten
        llm.close()
        assert owner.closed and executor.closed


def test_guesses_in_a_score_are_not_made(make_llm: MakeLLM) -> None:
    llm = make_llm(NgramDrafter(), rule=periodic)
    assert llm.logits([1, 2, 3] * 10).argmax(1)[20] == periodic(([1, 2, 3] * 10)[:21], VOCAB)


# -- the distribution ------------------------------------------------------------------------------------------------

SMALL, DRAWS = 5, 4000
CRITICAL = 190.0  # chi-square with 124 degrees of freedom exceeds it about once in ten thousand


class Table(FakeExecutor):
    """Five tokens; the logits depend on the last two."""

    def _logits(self, context: list[int]) -> np.ndarray:
        source = np.random.default_rng([SMALL, *context[-2:]])
        return source.normal(0.0, 1.0, self.vocab_size).astype(np.float32)


class Fixed(Oracle):
    """The same tree behind every token: some siblings, one of them with children."""

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        draft = Draft((3, 0, 4, 1, 2), (-1, -1, 1, 1, 0))
        return {wish.generation.request_id: Proposal(draft, (0.5,) * 5) for wish in wishes}


def chi_square(manifest: Manifest) -> float:
    """The first tokens after a prompt, drawn many times with guesses, against the model's own probabilities."""
    executor = Table(vocab_size=SMALL, num_blocks=64, max_step_tokens=64, max_logit_rows=64)
    llm = LLM(manifest, executor, speculator=Speculator(Fixed(0.0), adaptive=False))
    prompt = [1, 2]
    params = [SamplingParams(max_tokens=7, temperature=1.0, n=16, seed=seed) for seed in range(DRAWS // 16)]
    seen = Counter(one.token_ids[:3] for one in llm.generate([prompt] * len(params), params))
    assert llm.loop.speculator.counts.accepted > DRAWS / 2
    total = 0.0
    for triple in itertools.product(range(SMALL), repeat=3):
        chance = 1.0
        for at in range(3):
            weights = np.exp(executor._logits([*prompt, *triple[:at]]).astype(np.float64))
            chance *= weights[triple[at]] / weights.sum()
        total += (seen[triple] - DRAWS * chance) ** 2 / (DRAWS * chance)
    return total


def siblings(draft: Draft | None, row: int) -> list[int]:
    """The guesses behind a logit row."""
    pairs = [] if draft is None else zip(draft.token_ids, draft.parents, strict=True)
    return [token for token, parent in pairs if parent == row - 1]


def resampling(draft: Draft | None, sample: Callable[[int], Any], end_ids: Any) -> Walk:
    """A known mistake: after a rejection the token is drawn from the model's distribution as a whole, and not from what
    the rejected guesses have left of it."""

    def again(row: int) -> Any:
        found = sample(row)
        guesses = siblings(draft, row)
        return sample(row) if guesses and found.token_id not in guesses else found

    return follow(draft, again, end_ids)


def trusting(draft: Draft | None, sample: Callable[[int], Any], end_ids: Any) -> Walk:
    """Another: the first guess is taken where the model would have drawn it only perhaps."""

    def first(row: int) -> Any:
        found = sample(row)
        guesses = siblings(draft, row)
        return replace(found, token_id=guesses[0]) if guesses and found.token_id == 2 else found

    return follow(draft, first, end_ids)


@pytest.mark.parametrize(("walk", "is_right"), [(follow, True), (resampling, False), (trusting, False)])
def test_samples_have_the_models_distribution(
    toy_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch, walk: Any, is_right: bool
) -> None:
    """Chi-square over the triples of a small vocabulary; two wrong implementations must fail it."""
    monkeypatch.setattr("icc.runtime.stepping.follow", walk)
    assert (chi_square(toy_manifest(vocab_size=SMALL, eos_token_ids=[])) < CRITICAL) == is_right


# -- the ledger ------------------------------------------------------------------------------------------------------


def play(account: Account, steps: int, cost: float, accept: Callable[[int], int]) -> tuple[float, int]:
    """(time in plain steps, tokens) of a request whose drafts of four guesses cost `cost` plain steps each."""
    time, tokens = 0.0, 0
    for step in range(steps):
        time += 1
        tokens += 1
        if account.tick() and account.balance >= cost:
            right = accept(step)
            time += cost
            tokens += right
            account.settle(4, 4, right, cost)
    return time, tokens


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("steps", [100, 1000])
def test_a_request_that_never_accepts_costs_at_most_three_percent(cost: float, steps: int) -> None:
    time, tokens = play(Account(0.6), steps, cost, lambda step: 0)
    assert tokens == steps
    assert time <= 1.03 * steps


def test_what_pays_goes_on_and_what_stops_paying_stops() -> None:
    account = Account(0.6)
    time, tokens = play(account, 200, 0.4, lambda step: 2)
    assert tokens / time > 2.0
    time, _ = play(account, 300, 0.4, lambda step: 0)
    assert time < 300 + MOST_SAVED + 300 * 0.02
    time, tokens = play(account, 2000, 0.4, lambda step: 3)  # it is noticed when it pays again
    assert tokens / time > 1.5


def test_costs_are_measured() -> None:
    times = StepTimes(slope=0.1)
    assert times.most(1) == 0  # nothing is tried before a step without guesses was timed
    times.record(1, 0, 1.0)
    assert times.most(1) == 1
    assert times.charge(1, 4) == pytest.approx(1.5 / 1.1 - 1 + OVERHEAD)
    for _ in range(50):
        times.record(1, 0, 1.0)
        times.record(16, 0, 4.0)
        times.record(1, 4, 1.2)
        times.record(1, 8, 1.4)
    assert times.most(1) == 16
    assert times.charge(1, 8) == pytest.approx(0.4, abs=0.01)
    assert times.charge(1, 6) == pytest.approx(0.3, abs=0.01)
    assert times.charge(1, 2) == pytest.approx(0.1, abs=0.01)
    times.record(16, 16, 8.0)
    assert times.charge(16, 16) == pytest.approx(16.0, abs=0.01)  # each of sixteen requests waits one step longer
    times.record(1, 0, 100.0)  # a hiccup changes little, and is forgotten at once
    assert times.charge(1, 8) == pytest.approx(0.27, abs=0.02)
    times.record(1, 0, 1.0)
    assert times.charge(1, 8) == pytest.approx(0.37, abs=0.02)


class Clock:
    """Says how long steps take, instead of the clock on the wall: one, and `per_guess`."""

    def __init__(self, per_guess: float) -> None:
        self.times, self.per_guess = StepTimes(), per_guess

    def record(self, decodes: int, guesses: int, seconds: float) -> None:
        self.times.record(decodes, guesses, decodes + self.per_guess * guesses)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.times, name)


@pytest.mark.parametrize("right", [0.0, 0.5])
def test_where_guesses_cost_as_much_as_tokens_nobody_drafts_for_long(make_llm: MakeLLM, right: float) -> None:
    """A batch of eight in which a step's time is that of its tokens: it costs at most 3 % and the first probes."""
    llm = make_llm(Oracle(right), adaptive=True, max_batch_size=8, num_blocks=400, max_logit_rows=64)
    llm.loop.speculator.times = Clock(1.0)
    prompts, params = [[i, 1, 2] for i in range(8)], SamplingParams(max_tokens=60, ignore_eos=True)
    assert llm.generate(prompts, params) == make_llm(num_blocks=400).generate(prompts, params)
    spent = sum(batch.num_tokens for batch in llm.executor.batches)
    assert spent < 8 * 3 + 8 * 59 * 1.03 + 8 * 2


class Late(Oracle):
    """Its first guesses are wrong, all others right."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.asked = 0

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        self.asked += 1
        found = {}
        for wish in wishes:
            text = [*wish.generation.prompt, *wish.generation.token_ids]
            for _ in range(wish.count):
                text.append((context_hash(text, VOCAB) + (self.asked < 3)) % VOCAB)
            found[wish.generation.request_id] = Proposal(Draft.chain(text[-wish.count :]), (0.6,) * wish.count)
        return found


def test_who_paused_drafts_again_though_steps_run_ahead(make_llm: MakeLLM) -> None:
    """A device is given the next step while nobody may draft; the pause must end all the same."""
    drafter = Late()
    llm = make_llm(drafter, adaptive=True)
    llm.loop.speculator.times = Clock(0.1)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    assert llm.generate([[5, 6]], params) == make_llm().generate([[5, 6]], params)
    counts = llm.loop.speculator.counts
    assert counts.accepted > 10 and counts.tokens == 59
    if isinstance(llm.executor, FakeDevice):
        assert llm.executor.most_under_way == 2, "no step ran ahead"
