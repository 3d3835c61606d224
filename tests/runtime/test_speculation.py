"""Speculative decoding over the fake executor: for any guesses, every request gets the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from icc.runtime.errors import RequestError
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.policy import Window
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeExecutor, context_hash
from icc.runtime.requests.params import SamplingParams
from icc.runtime.speculate.ngram import NgramDrafter
from icc.runtime.speculate.second_engine import EngineDrafter
from oracle_drafters import VOCAB, Oracle

from .test_ledger import Clock

MakeLLM = Callable[..., LLM]


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
        {"num_blocks": 16, "more_groups": [GroupConfig(9, 4, 6, Window(9)), GroupConfig(18, 1, 9, Window(3))]},
    ],
)
def test_tokens_are_those_of_plain_decoding(make_llm: MakeLLM, executor: dict[str, Any], right: float) -> None:
    """Greedy, with preemption, chunked prompts, prefix reuse and several trees in a step."""
    plain = make_llm(num_blocks=200).generate(PROMPTS, PARAMS)
    llm = make_llm(Oracle(right), **executor)
    for _ in range(2):  # the second time with the prefix cache, whose blocks contain moved tokens
        for expected, got in zip(plain, llm.generate(PROMPTS, PARAMS), strict=True):
            assert got == expected
        llm.loop.scheduler.check()
        assert not llm.loop.has_work()
    assert right == 0 or llm.loop.speculator.counts.accepted > 20
    assert llm.executor.batches[-1].num_tokens <= llm.executor.max_step_tokens


def test_seeded_samples_are_those_of_plain_decoding(make_llm: MakeLLM) -> None:
    """One request must be sampled on the host (penalties); others have log-probabilities or several completions."""
    params = [
        SamplingParams(max_tokens=12, temperature=5.0, seed=1, n=2),
        SamplingParams(max_tokens=12, temperature=3.0, seed=2, top_k=5, logprobs=2),
        SamplingParams(max_tokens=12, temperature=4.0, seed=3, frequency_penalty=1.0, min_tokens=4),
    ]
    prompts = [[seed, 1, 2] for seed in range(3)]
    plain = make_llm().generate(prompts, params)
    assert make_llm(Oracle(0.9)).generate(prompts, params) == plain


def counting(tokens: Sequence[int], vocab: int) -> int:
    """The letters a, b, c, ... as bytes."""
    return (tokens[-1] + 1 - 97) % 26 + 97


@pytest.mark.parametrize("length", range(1, 14))
def test_stop_strings_and_limits_are_exact(make_llm: MakeLLM, length: int) -> None:
    """At any position in a tree at which the text or the number of tokens ends."""
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
    [generation] = llm.submit(llm.prompting.query("xyz", SamplingParams(max_tokens=20), {})).generations
    while generation.finish_reason is None:
        llm.loop.step()
    outputs = list(generation.outputs)
    assert [output.token_id for output in outputs] == list(b"abcdefghijklmnopqrst")
    assert len(llm.executor.batches) < 20
    assert [output.finish_reason for output in outputs] == [None] * 19 + ["length"]


def test_logits_that_are_not_numbers_end_the_request_after_the_good_tokens(make_llm: MakeLLM) -> None:
    llm = make_llm(Oracle(1.0, rule=counting), rule=counting, nan_after=ord("f"))
    [got] = llm.generate(["xyz"], SamplingParams(max_tokens=40))
    assert (bytes(got.token_ids), got.finish_reason) == (b"abcdef", "error")


def periodic(tokens: Sequence[int], vocab: int) -> int:
    """Repeats the token 7 positions back."""
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
    """A draft engine of the same model guesses everything right, even with little memory; another changes no tokens."""
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
        assert drafter._kv.is_idle  # all requests were forgotten
        llm.close()
        assert owner.closed and executor.closed


def test_guesses_in_a_score_are_not_made(make_llm: MakeLLM) -> None:
    llm = make_llm(NgramDrafter(), rule=periodic)
    assert llm.logits([1, 2, 3] * 10).argmax(1)[20] == periodic(([1, 2, 3] * 10)[:21], VOCAB)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_request_may_go_without(make_llm: MakeLLM, adaptive: bool) -> None:
    """It gets no guesses before, beside and after others; its tokens are the same."""
    llm, prompts = make_llm(Oracle(0.9), adaptive=adaptive), [[5, 6], [7, 8], [5, 6]]
    assert llm.loop.speculator is not None
    llm.loop.speculator.accounts.times = Clock(0.05)
    params = [SamplingParams(max_tokens=30, ignore_eos=True, speculative=bool(i % 2)) for i in range(3)]
    assert llm.generate(prompts, params) == make_llm().generate(prompts, params)
    drafted = {s.request_id for batch in llm.executor.batches for s in batch.sequences if s.draft is not None}
    assert len(drafted) == 1
    before = llm.loop.speculator.counts.guesses
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=30, ignore_eos=True, speculative=False))
    assert llm.loop.speculator.counts.guesses == before > 0
    with pytest.raises(RequestError, match="speculative = 1: must be true or false"):
        SamplingParams(speculative=1)
