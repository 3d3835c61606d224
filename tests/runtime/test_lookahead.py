"""Lookahead decoding: n-grams and acceptance are those of a plain version of the paper's algorithm, and the tokens are
those without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from icc.compiler.speculate.choice import SpecChoice
from icc.runtime.errors import UsageError
from icc.runtime.format.lookahead import Lookahead
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.policy import Window as WindowPolicy
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeExecutor, context_hash
from icc.runtime.requests.params import SamplingParams
from icc.runtime.speculate import lookahead
from icc.runtime.speculate.choose import choose_speculator
from icc.runtime.speculate.ledger import LOAN
from icc.runtime.speculate.lookahead import LookaheadDrafter, NgramPool
from icc.runtime.speculate.speculator import Speculator
from oracle_drafters import VOCAB

from .test_ledger import Clock

MakeLLM = Callable[..., LLM]
Rule = Callable[[Sequence[int], int], int]
PROMPT = [5, 9, 2, 30, 5, 7]


def near(tokens: Sequence[int], vocab: int) -> int:
    """The next token depends on the last two, mostly on the last: earlier wrong tokens soon have no effect."""
    return (7 * tokens[-1] + tokens[-2:][0] // 3) % 23


def published(prompt: Sequence[int], steps: int, shape: Lookahead, rule: Rule) -> tuple[list[int], list[int], Any]:
    """The paper's algorithm over a function, in plain lists: the text after the prompt, the number of accepted guesses
    per step, and the pool of n-grams. level[l][c] is the window."""
    source, text = random.Random(0), list(prompt)
    columns = [source.choices(prompt, k=shape.ngram - 1) for _ in range(shape.window)]
    level = [[column[depth] for column in columns] for depth in range(shape.ngram - 1)]
    pool: dict[int, list[tuple[int, ...]]] = {}
    accepted: list[int] = []
    for step in range(steps):
        level[0][0] = text[-1]
        branches = [level[0][1 : c + 1] + [row[c] for row in level[1:]] for c in range(shape.window)]
        results = [rule(text + branch, VOCAB) for branch in branches]
        guesses = [*map(list, pool.get(text[-1], [])), *branches]
        fresh = [rule(text, VOCAB)]
        while any(guess[: len(fresh)] == fresh for guess in guesses):
            fresh.append(rule(text + fresh, VOCAB))
        if step >= shape.ngram - 2:  # by now the first, random tokens have left the window
            for c, result in enumerate(results):
                tail = (*(row[c] for row in level[1:]), result)
                known = pool.setdefault(level[0][c], [])
                pool[level[0][c]] = [*(other for other in known if other != tail), tail][-shape.guesses :]
        level = [*level[1:], results]
        text += fresh
        accepted.append(len(fresh) - 1)
    return text[len(prompt) :], accepted, pool


@pytest.mark.parametrize("rule", [near, context_hash])
@pytest.mark.parametrize("shape", [Lookahead(), Lookahead(2, 2, 1), Lookahead(5, 4, 2), Lookahead(4, 3, 9)])
def test_n_grams_and_acceptance_are_those_of_the_algorithm(toy_manifest: Any, shape: Lookahead, rule: Rule) -> None:
    """Compared step by step, while the request's end cuts no column."""
    executor = FakeExecutor(vocab_size=VOCAB, rule=rule, num_blocks=200, max_step_tokens=64, max_logit_rows=64)
    llm = LLM(toy_manifest(max_seq_len=512), executor, speculator=Speculator(LookaheadDrafter(shape), adaptive=False))
    [generation] = llm.loop.add(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
    speculator = llm.loop.speculator
    assert speculator is not None
    llm.loop.step()
    prompt, accepted = [*PROMPT, *generation.token_ids], list[int]()
    while len(accepted) < 40:
        before = speculator.counts.accepted
        llm.loop.step()
        accepted.append(speculator.counts.accepted - before)
    assert llm.loop.speculator is speculator, "it failed"
    text, expected, pool = published(prompt, len(accepted), shape, rule)
    assert accepted == expected
    assert generation.token_ids[1:] == text
    _, found = cast(LookaheadDrafter, speculator.drafter)._requests[generation.request_id]
    assert {first: list(found.behind(first))[::-1] for first in pool} == pool
    assert rule is context_hash or sum(accepted) > (100 if shape == Lookahead() else 0)


@pytest.mark.parametrize(
    "executor",
    [
        {},
        {"num_blocks": 16, "max_batch_size": 8, "max_step_tokens": 12, "max_logit_rows": 10},
        {"num_blocks": 60, "block_size": 1, "max_batch_size": 4, "max_step_tokens": 9},
        {"num_blocks": 16, "more_groups": [GroupConfig(9, 4, 6, WindowPolicy(9))]},
    ],
)
def test_tokens_are_those_without_it(make_llm: MakeLLM, executor: dict[str, Any]) -> None:
    """Greedy and sampled, on host and device, with preemption and with steps that cut the window."""
    prompts = [[5], [1, 2, 3] * 7, [9] * 12, [1, 2, 3] * 7, list(range(30))]
    params = [
        SamplingParams(max_tokens=20 + i, temperature=[0.0, 5.0][i % 2], seed=i, frequency_penalty=[0.0, 0.5][i == 3])
        for i in range(len(prompts))
    ]
    plain = make_llm(rule=near).generate(prompts, params)
    llm = make_llm(LookaheadDrafter(Lookahead(3, 3, 3)), rule=near, **executor)
    for _ in range(2):
        assert llm.generate(prompts, params) == plain
        llm.loop.scheduler.check()
    speculator = llm.loop.speculator
    assert speculator is not None and speculator.counts.accepted > 5
    assert not cast(LookaheadDrafter, speculator.drafter)._requests, "what ended is forgotten"


def adaptive(make_llm: MakeLLM, per_guess: float) -> tuple[LLM, Clock]:
    llm, clock = make_llm(LookaheadDrafter(Lookahead()), adaptive=True, rule=near), Clock(per_guess)
    assert llm.loop.speculator is not None
    llm.loop.speculator.accounts.times = cast(Any, clock)
    return llm, clock


def test_where_it_pays_it_goes_on(make_llm: MakeLLM) -> None:
    """A step with all guesses takes 1.3 times as long: the window grows with the measured times, and saves more
    steps."""
    llm, _ = adaptive(make_llm, 0.005)
    params = SamplingParams(max_tokens=57, ignore_eos=True)
    for _ in range(4):
        llm.generate([PROMPT], params)
    before = len(llm.executor.batches)
    llm.generate([PROMPT], params)
    assert max(batch.num_tokens for batch in llm.executor.batches[before:]) > 40
    assert len(llm.executor.batches) - before < 57 / 1.5


def test_where_it_loses_it_stops(make_llm: MakeLLM) -> None:
    """A guess costs half a token: requests lose at most their credit, and the first ones the drafter's stake."""
    llm, _ = adaptive(make_llm, 0.5)
    params = SamplingParams(max_tokens=57, ignore_eos=True)
    spent = []
    for _ in range(12):
        before = len(llm.executor.batches)
        llm.generate([PROMPT], params)
        spent.append(sum(1 + 0.5 * (batch.num_tokens - 1) for batch in llm.executor.batches[before + 1 :]))
    assert sum(spent) < 12 * 56 * 1.03 + LookaheadDrafter.stake + LOAN
    assert sum(spent[-4:]) < 4 * 56 * 1.03


def test_pools_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest n-grams of the newest first tokens stay; one that is added again counts as the newest."""
    monkeypatch.setattr(lookahead, "KEYS", 2)
    pool = NgramPool(2)
    for tail in ((1, 2), (3, 4), (1, 2), (5, 6)):
        pool.add(7, tail)
    assert list(pool.behind(7)) == [(5, 6), (1, 2)]
    pool.add(8, (1, 1))
    pool.add(9, (1, 1))
    assert list(pool.behind(7)) == [] and list(pool.behind(9)) == [(1, 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("15,5,15", "119 tokens in a step, at most 63"),
        ("1,3,1", "at least 2"),
        ("3,3,0", "the guesses at least 1"),
        ("3,3", "not W,N,G"),
        ("a,b,c", "not W,N,G"),
    ],
)
def test_shapes_are_checked_when_compiling_and_when_loading(text: str, said: str) -> None:
    engine, executor = cast(Any, SimpleNamespace(program=SimpleNamespace(speculation=None))), FakeExecutor()
    engine.manifest = SimpleNamespace(embedding=None)
    for ask in (SpecChoice.parse, lambda spec: choose_speculator(spec, engine, executor, cast(Any, None))):
        with pytest.raises(UsageError, match=f"--spec lookahead:{text}: .*{said}"):
            ask(f"lookahead:{text}")
    choice = SpecChoice.parse("lookahead:3,4,5")
    assert choice is not None and choice.drafter == "lookahead:3,4,5"


def test_recurrent_states_check_no_window_and_read_no_noise() -> None:
    engine = cast(Any, SimpleNamespace(program=SimpleNamespace(speculation=None)))
    engine.manifest = SimpleNamespace(embedding=None)
    executor = cast(Any, SimpleNamespace(groups=[SimpleNamespace(holds_states=True)]))
    with pytest.raises(UsageError, match="--spec lookahead: the model has recurrent states"):
        choose_speculator("lookahead", engine, executor, cast(Any, None))
    with pytest.raises(UsageError, match="--spec uno:DIR: the model has recurrent states, which noise would change"):
        choose_speculator("uno:DIR", engine, executor, cast(Any, None), adapters=cast(Any, object()))
