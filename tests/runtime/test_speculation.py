"""Speculative decoding over the fake executor: whatever is guessed, every request gets the tokens of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from icc.runtime.engine.manifest import Manifest
from icc.runtime.executor.fake import FakeDevice, FakeExecutor, context_hash
from icc.runtime.llm import LLM
from icc.runtime.params import SamplingParams
from icc.runtime.scheduler.batch import Draft
from icc.runtime.speculate.drafter import Proposal, Wish
from icc.runtime.speculate.ngram import NgramDrafter
from icc.runtime.speculate.speculator import Speculator
from icc.runtime.tokenizer import Tokenizer

VOCAB = 258
MakeLLM = Callable[..., LLM]


class Oracle:
    """Random trees of guesses, of which a share is what the fake model says next."""

    name = "oracle"

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

    def observe(self, rows: Mapping[int, int], batch_size: int) -> None:
        pass

    def forget(self, request_id: int) -> None:
        pass

    def close(self) -> None:
        pass


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
    llm = make_llm(NgramDrafter(), adaptive=True, rule=periodic)
    prompt = [10, 11, 12, 13, 14, 15, 16, 10, 11, 12]
    [got] = llm.generate([prompt], SamplingParams(max_tokens=40))
    assert got.token_ids == tuple((prompt[3:10] * 7)[:40])
    assert len(llm.executor.batches) < 15


def test_guesses_in_a_score_are_not_made(make_llm: MakeLLM) -> None:
    llm = make_llm(NgramDrafter(), rule=periodic)
    assert llm.logits([1, 2, 3] * 10).argmax(1)[20] == periodic(([1, 2, 3] * 10)[:21], VOCAB)
