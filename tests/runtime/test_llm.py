"""LLM over the fake executor: a request's result does not depend on memory, chunks, caches or other requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from icc.runtime.errors import CapacityError, RequestError
from icc.runtime.format.manifest import Manifest, SamplingDefaults
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.policy import Window
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeDevice, FakeExecutor, context_hash
from icc.runtime.requests.generation import Completion
from icc.runtime.requests.params import SamplingParams
from icc.runtime.tokenizer import Tokenizer

VOCAB = 258
MakeLLM = Callable[..., LLM]


@pytest.fixture(params=[FakeExecutor, FakeDevice])
def make_llm(request: Any, toy_manifest: Callable[..., Manifest], byte_tokenizer_file: Path) -> MakeLLM:
    """An LLM over a fake that samples on the host or on its device. Arguments are the executor's; text=False omits the
    tokenizer."""

    def make(text: bool = True, manifest: dict[str, Any] | None = None, **executor: Any) -> LLM:
        executor.setdefault("vocab_size", VOCAB)
        tokenizer = Tokenizer(byte_tokenizer_file.read_bytes()) if text else None
        return LLM(toy_manifest(**(manifest or {})), request.param(**executor), tokenizer)

    return make


def expected(prompt: list[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(context_hash(tokens, VOCAB))
        if tokens[-1] == 257:
            break
    return tuple(tokens[len(prompt) :])


PROMPTS = [[5], [1, 2, 3] * 7, [9] * 12, [1, 2, 3] * 7, [1, 2, 3] * 6 + [8], [200, 100], list(range(30)), [9] * 13]


@pytest.mark.parametrize(
    "executor",
    [
        {"num_blocks": 200, "max_batch_size": 8, "max_step_tokens": 64},
        {"num_blocks": 200, "max_batch_size": 1, "max_step_tokens": 1, "max_logit_rows": 1},
        {"num_blocks": 16, "max_batch_size": 8, "max_step_tokens": 8},
        {"num_blocks": 16, "max_batch_size": 3, "max_step_tokens": 5, "max_logit_rows": 3},
        {"num_blocks": 16, "max_batch_size": 8, "max_step_tokens": 8, "host_blocks": 7},
        {"num_blocks": 60, "block_size": 1, "max_batch_size": 4, "max_step_tokens": 7},
        {"num_blocks": 5, "block_size": 16, "max_batch_size": 4, "max_step_tokens": 33},
        {"num_blocks": 60, "more_groups": [GroupConfig(12, 4, 0, Window(6))], "max_step_tokens": 12},
        {"num_blocks": 16, "more_groups": [GroupConfig(6, 4, 6, Window(9)), GroupConfig(9, 2, 9, Window(4))]},
    ],
)
def test_output_does_not_depend_on_what_else_runs(make_llm: MakeLLM, executor: dict[str, Any]) -> None:
    llm = make_llm(rule=context_hash, **executor)
    params = [SamplingParams(max_tokens=10 + 3 * index) for index in range(len(PROMPTS))]
    for _ in range(2):  # the second time out of the prefix cache
        for prompt, one, completion in zip(PROMPTS, params, llm.generate(PROMPTS, params), strict=True):
            assert completion.token_ids == expected(prompt, one.max_tokens)
            assert completion.prompt_token_ids == tuple(prompt)
        llm.loop.scheduler.check()
        assert not llm.loop.has_work()


@pytest.mark.parametrize("host_blocks", [0, 4, 40])
def test_preempted_scores_are_given_once(make_llm: MakeLLM, host_blocks: int) -> None:
    llm = make_llm(num_blocks=16, host_blocks=host_blocks, max_batch_size=2, rule=context_hash)
    wanted = llm.logits(list(range(40)))
    generation, *_ = llm.loop.add([9] * 12, SamplingParams(max_tokens=30, ignore_eos=True))
    scores = llm.loop.add_score(list(range(40)))
    chunks = []
    while llm.loop.has_work():
        llm.loop.step()
        chunks += scores.take()
        if len(chunks) == 1:
            llm.loop.scheduler.queues.preempt(llm.loop.scheduler.queues.requests[scores.request_id])
    assert np.array_equal(np.concatenate(chunks), wanted) and len(generation.token_ids) == 30
    assert llm.loop.scheduler.num_swaps == (host_blocks > 0)


def test_sampled_output_depends_on_the_seed_alone(make_llm: MakeLLM) -> None:
    params = [SamplingParams(max_tokens=12, temperature=5.0, seed=seed) for seed in range(6)]
    prompts = [[seed, 1, 2] for seed in range(6)]
    together = make_llm(num_blocks=16).generate(prompts, params)
    alone = [make_llm().generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert together == alone
    assert len({completion.token_ids for completion in together}) == 6


def test_text_streams_and_ends_before_a_stop_string(make_llm: MakeLLM) -> None:
    llm = make_llm()
    assert list(llm.stream("ab", SamplingParams(max_tokens=4))) == ["c", "d", "e", "f"]
    [completion] = llm.generate(["ab"], SamplingParams(max_tokens=20, stop=("fgh", "zzz")))
    assert (completion.text, completion.finish_reason) == ("cde", "stop")
    assert bytes(completion.token_ids) == b"cdefgh"
    assert "".join(llm.stream("ab", SamplingParams(max_tokens=20, stop=("fgh",)))) == "cde"
    cut_params = SamplingParams(max_tokens=5, stop=("fgh",))
    assert "".join(llm.stream("ab", cut_params)) == "cdefg"
    [cut] = llm.generate(["ab"], cut_params)
    assert (cut.text, cut.finish_reason) == ("cdefg", "length")  # the held-back text is shown at the end


def test_end_token_stop_ids_and_ignore_eos(make_llm: MakeLLM) -> None:
    llm = make_llm()
    [eos] = llm.generate([[254]])
    assert (eos.token_ids, eos.finish_reason) == ((255, 256, 257), "stop")
    [on] = llm.generate([[254]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert (on.token_ids, on.finish_reason) == ((255, 256, 257, 0, 1), "length")
    [stop] = llm.generate([[97]], SamplingParams(stop_token_ids=(100,)))
    assert (stop.text, stop.token_ids, stop.finish_reason) == ("bc", (98, 99, 100), "stop")
    [held] = llm.generate([[254]], SamplingParams(max_tokens=8, min_tokens=4))
    assert 257 not in held.token_ids[:4]


def test_generation_ends_at_the_longest_sequence(make_llm: MakeLLM) -> None:
    llm = make_llm(num_blocks=64)
    [completion] = llm.generate([[1] * 60], SamplingParams(max_tokens=50))
    assert (len(completion.token_ids), completion.finish_reason) == (4, "length")
    [full] = llm.generate([[1] * 64], SamplingParams(max_tokens=50))
    assert (full.token_ids, full.finish_reason) == ((), "length")


def test_n_completions_share_the_prompt(make_llm: MakeLLM) -> None:
    llm = make_llm(max_step_tokens=64)
    completions = llm.generate(
        [[1] * 20, [7]], [SamplingParams(max_tokens=6, temperature=9.0, seed=1, n=3), SamplingParams(max_tokens=2)]
    )
    assert [completion.index for completion in completions] == [0, 1, 2, 0]
    assert len({completion.token_ids for completion in completions[:3]}) == 3
    executor = llm.executor
    assert isinstance(executor, FakeExecutor)
    assert sum(batch.num_tokens for batch in executor.batches) < 20 * 2 + 3 * 6 + 20


def test_logits_are_those_of_every_position(make_llm: MakeLLM) -> None:
    llm = make_llm(rule=context_hash, max_step_tokens=7, max_batch_size=2, max_logit_rows=3)
    token_ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    logits = llm.logits(token_ids)
    assert logits.shape == (11, VOCAB) and logits.dtype == np.float32
    assert logits.argmax(1).tolist() == [context_hash(token_ids[: i + 1], VOCAB) for i in range(11)]
    llm.generate([token_ids])
    assert (llm.logits(token_ids) == logits).all()  # cached tokens are computed, too


def test_logits_while_a_request_is_under_way(make_llm: MakeLLM) -> None:
    llm = make_llm(rule=context_hash)
    stream = llm.stream([5, 6], SamplingParams(max_tokens=30))
    first = next(stream).token_ids
    assert llm.logits([1, 2, 3]).argmax(1).tolist() == [context_hash([1, 2, 3][: i + 1], VOCAB) for i in range(3)]
    assert sum((increment.token_ids for increment in stream), first) == expected([5, 6], 30)


def test_two_streams_take_turns(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=4)
    pairs = list(zip(llm.stream("a", params), llm.stream("m", params), strict=True))
    assert pairs == [("b", "n"), ("c", "o"), ("d", "p"), ("e", "q")]


def test_progress_counts_what_has_ended(make_llm: MakeLLM) -> None:
    told: list[tuple[int, int]] = []
    make_llm().generate(
        ["a", "b"], [SamplingParams(max_tokens=4, n=2), SamplingParams(max_tokens=9)], lambda *s: told.append(s)
    )
    assert told == [(0, 3), (2, 3), (3, 3)]


def test_closing_a_stream_frees_its_blocks(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream("ab", SamplingParams(max_tokens=30))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.loop.has_work() and llm.loop.scheduler.kv.is_idle


def test_not_a_number_ends_that_request_alone(make_llm: MakeLLM) -> None:
    llm = make_llm(nan_after=100)
    bad, good = llm.generate([[98], [10]], SamplingParams(max_tokens=5))
    assert (bad.token_ids, bad.finish_reason) == ((99, 100), "error")
    assert (good.token_ids, good.finish_reason) == ((11, 12, 13, 14, 15), "length")
    assert not llm.loop.has_work()


def test_a_failing_executor_ends_everything_and_the_engine_goes_on(make_llm: MakeLLM) -> None:
    llm = make_llm()
    executor = llm.executor
    assert isinstance(executor, FakeExecutor)
    real, executor.step = executor.step, lambda batch: (_ for _ in ()).throw(OSError("gone"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="gone"):
        llm.generate([[1], [2]])
    executor.step = real  # type: ignore[method-assign]
    llm.loop.scheduler.check()
    assert llm.generate([[1]], SamplingParams(max_tokens=1))[0].token_ids == (2,)


def test_logprobs_per_token(make_llm: MakeLLM) -> None:
    [completion] = make_llm().generate([[1]], SamplingParams(max_tokens=3, logprobs=2))
    assert completion.logprobs is not None and [entry.token_id for entry in completion.logprobs] == [2, 3, 4]
    assert all(entry.top[0] == (entry.token_id, entry.logprob) and len(entry.top) == 2 for entry in completion.logprobs)


def test_the_engine_s_sampling_defaults_apply(make_llm: MakeLLM) -> None:
    llm = make_llm(manifest={"sampling": SamplingDefaults(temperature=50.0)})
    sampled = llm.generate([[1]] * 3, SamplingParams(max_tokens=8))
    assert len({completion.token_ids for completion in sampled}) == 3
    [greedy] = llm.generate([[1]], SamplingParams(max_tokens=2, temperature=0.0))
    assert greedy.token_ids == (2, 3)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([1, VOCAB], {}, f"token id {VOCAB} is not in the vocabulary of {VOCAB}"),
        ([-1], {}, "token id -1 is not in the vocabulary"),
        ([1] * 65, {}, "the prompt has 65 tokens, the engine takes at most 64"),
        ([], {}, "the prompt is empty"),
        ("", {}, "the prompt is empty"),
        ("\udc80", {}, "not valid Unicode"),
        (7, {}, "not token ids"),
        ([1.5], {}, "not token ids"),
        (["a"], {}, "not token ids"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids: token id 258"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias: token id 258"),
    ],
)
def test_wrong_requests_are_refused_and_nothing_runs(
    make_llm: MakeLLM, prompt: Any, params: dict[str, Any], message: str
) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate([[1], prompt], SamplingParams(**params))
    assert not llm.loop.has_work()
    executor = llm.executor
    assert isinstance(executor, FakeExecutor) and not executor.batches


def test_requests_that_need_a_tokenizer_are_refused_without_one(make_llm: MakeLLM) -> None:
    llm = make_llm(text=False)
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate(["a"])
    with pytest.raises(RequestError, match="stop: the engine has no tokenizer"):
        llm.generate([[1]], SamplingParams(stop=("a",)))
    [completion] = llm.generate([[1]], SamplingParams(max_tokens=2))
    assert completion == Completion("", (2, 3), "length", (1,))


def test_an_empty_prompt_starts_with_bos_where_there_is_one(make_llm: MakeLLM) -> None:
    llm = make_llm(manifest={"bos_token_id": 40})
    assert llm.generate([""], SamplingParams(max_tokens=1))[0].prompt_token_ids == (40,)


def test_a_request_larger_than_the_cache_is_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(CapacityError, match="needs 5 KV blocks of 4 tokens, the cache has 4"):
        make_llm(num_blocks=4).generate([[1] * 10], SamplingParams(max_tokens=8))
