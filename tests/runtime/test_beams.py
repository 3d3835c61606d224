"""Beam search over fakes: the texts that it finds, beside other requests and after losses of KV."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from icc import SamplingParams
from icc.runtime.async_llm import AsyncLLM
from icc.runtime.errors import CapacityError, RequestError
from icc.runtime.format.manifest import Manifest, SamplingDefaults
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.policy import Window
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeDevice, FakeExecutor, context_hash
from icc.runtime.requests.beam_search import BeamSearch
from icc.runtime.requests.generation import Generation
from icc.runtime.requests.sampler import Sampler
from icc.runtime.tokenizer import Tokenizer

VOCAB = 258
Scores = Callable[[Sequence[int]], np.ndarray]


def varied(context: Sequence[int], vocab_size: int = VOCAB) -> np.ndarray:
    """Random logits that depend on all tokens before, float32 [vocab_size]."""
    return np.random.default_rng(list(context)).normal(0, 2, vocab_size).astype(np.float32)


class Varied(FakeExecutor):
    def _logits(self, context: list[int]) -> np.ndarray:
        return varied(context, self.vocab_size)


class VariedDevice(FakeDevice, Varied):
    pass


@pytest.fixture(params=[Varied, VariedDevice])
def make(request: Any, toy_manifest: Callable[..., Manifest], byte_tokenizer_file: Any) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        options = {"num_blocks": 200, "max_step_tokens": 64, "max_logit_rows": 64, **options}
        return LLM(
            toy_manifest(vocab_size=VOCAB),
            request.param(vocab_size=VOCAB, rule=context_hash, **options),
            Tokenizer(byte_tokenizer_file.read_bytes()),
        )

    return make


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def every_text(scores: Scores, vocab: int, end: int, longest: int) -> dict[tuple[int, ...], float]:
    """The sums of log-probabilities of all texts that end, or have the maximum length, by their tokens."""
    found: dict[tuple[int, ...], float] = {}
    going_on: dict[tuple[int, ...], float] = {(): 0.0}
    for length in range(1, longest + 1):
        following = {}
        for tokens, total in going_on.items():
            for token, score in enumerate(log_softmax(scores(tokens))):
                ended = token == end or length == longest
                (found if ended else following)[(*tokens, token)] = total + float(score)
        going_on = following
    assert len(found) > vocab
    return found


def test_where_there_is_no_room_every_text_is_empty_and_has_a_score(make: Callable[..., LLM]) -> None:
    found = make().generate([[5, 6]], SamplingParams(beams=3, n=3, max_tokens=0))
    assert [(one.token_ids, one.finish_reason, one.score) for one in found] == [((), "length", 0.0)] * 3


@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5])
def test_with_beams_enough_it_finds_the_best_of_all_texts(penalty: float) -> None:
    vocab, end, longest = 4, 3, 4
    params = SamplingParams(
        beams=27, n=5, length_penalty=penalty, early_stopping="never", max_tokens=longest, temperature=0
    )
    search = BeamSearch(params, longest, [end], Sampler(params, (), vocab, [end]))
    numbers = itertools.count(1)
    while True:
        for beam in search.running:
            assert search.push(beam.number, varied([7, *beam.tokens], vocab))
        if not (choices := search.advance()):
            break
        search.placed([next(numbers) for _ in choices])
    every = every_text(lambda tokens: varied([7, *tokens], vocab), vocab, end, longest)
    wanted = sorted(every, key=lambda tokens: -every[tokens] / len(tokens) ** penalty)[:5]
    assert [one.tokens for one in search.best(5)] == wanted
    np.testing.assert_allclose(
        [one.score for one in search.best(5)], [every[t] / len(t) ** penalty for t in wanted], rtol=1e-5
    )


PARAMS = [
    SamplingParams(beams=4, n=3, max_tokens=12, early_stopping=True, stop_token_ids=tuple(range(40)), logprobs=2),
    SamplingParams(beams=3, n=1, max_tokens=20, length_penalty=0.5),
    SamplingParams(beams=2, n=2, max_tokens=9, early_stopping="never", stop_token_ids=tuple(range(100, 160))),
]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 9], [77] * 17]


def texts(found: Sequence[Any]) -> list[Any]:
    return [(one.token_ids, one.finish_reason, one.score, one.logprobs, one.index) for one in found]


def test_the_same_is_found_with_little_memory_and_among_others(make: Callable[..., LLM]) -> None:
    alone = [texts(make().generate([prompt], params)) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    plain = SamplingParams(max_tokens=25)
    for options in ({}, {"num_blocks": 19}, {"num_blocks": 19, "host_blocks": 12}, {"max_batch_size": 4}):
        llm = make(**options)
        window = GroupConfig(20, 4, 0, Window(6))
        llm = make(**options, more_groups=[window]) if "num_blocks" in options else llm
        found = llm.generate([*PROMPTS, [9, 8], [7]], [*PARAMS, plain, plain])
        assert texts(found[:3]) == alone[0] and texts(found[3:4]) == alone[1] and texts(found[4:6]) == alone[2]
        scheduler = llm.loop.scheduler
        scheduler.check()
        assert scheduler.kv.is_idle and not llm.loop.requests.live
        assert bool(scheduler.num_preemptions) == ("num_blocks" in options)
        copies = sum(len(u.copies) for batch in llm.executor.batches for u in batch.upkeep)  # type: ignore[attr-defined]
        assert copies > 10


def test_beams_share_what_they_have_in_common(make: Callable[..., LLM]) -> None:
    """The ten blocks of the prompt exist once; each beam has its own blocks for the tokens after it."""
    llm = make(num_blocks=30)
    task = llm.submit(llm.prompting.completion(list(range(40)), SamplingParams(beams=4, max_tokens=14)))
    most = 0
    while not task.done:
        llm.driver.step()
        [group] = llm.loop.scheduler.kv.groups
        most = max(most, group.pool.num_blocks - group.pool.num_available)
    assert 10 + 4 < most <= 10 + 4 * 4
    with pytest.raises(CapacityError, match="needs 34 KV blocks of 4 tokens, the cache has 30"):
        llm.generate([list(range(40))], SamplingParams(beams=4, max_tokens=33))
    with pytest.raises(CapacityError, match="9 beams run at once, and the engine takes 8 sequences"):
        llm.generate([[1]], SamplingParams(beams=9))


def test_a_step_that_fails_changes_nothing(make: Callable[..., LLM]) -> None:
    wanted = texts(make().generate([PROMPTS[0]], PARAMS[0]))
    llm = make()
    real, left = llm.executor.step, [6]

    def fail(batch: Any) -> np.ndarray:
        left[0] -= 1
        if left[0] == 0:
            raise OSError("a fault that goes away")
        return real(batch)

    llm.executor.step = fail  # type: ignore[method-assign]
    others = SamplingParams(max_tokens=6)
    assert texts(llm.generate([PROMPTS[0], [5]], [PARAMS[0], others])[:3]) == wanted
    assert left[0] < 0 and llm.loop.scheduler.kv.is_idle


def test_logits_that_are_no_numbers_end_all_and_leave_nothing(make: Callable[..., LLM]) -> None:
    llm = make()
    real = llm.executor.step
    calls = itertools.count()

    def spoil(batch: Any) -> np.ndarray:
        logits = real(batch).copy()
        if next(calls) == 3:
            logits[-1, 5] = np.nan
        return logits

    llm.executor.step = spoil  # type: ignore[method-assign]
    found = llm.generate([PROMPTS[0]], PARAMS[0])
    assert [one.finish_reason for one in found] == ["error"] * 3 and not any(one.token_ids for one in found)
    [group] = llm.loop.scheduler.kv.groups
    assert llm.loop.scheduler.kv.is_idle and not len(group.cache)
    assert texts(llm.generate([PROMPTS[0]], PARAMS[0])) == texts(make().generate([PROMPTS[0]], PARAMS[0]))


def test_what_is_ended_early_gives_the_best_there_is(make: Callable[..., LLM]) -> None:
    llm = make()
    task = llm.submit(llm.prompting.completion(PROMPTS[1], SamplingParams(beams=3, n=2, max_tokens=30)))
    for _ in range(5):
        llm.driver.step()
    assert not any(one.outputs for one in task.generations), "tokens come when all is known"
    llm.driver.abort(task, "deadline")
    first, second = (one.completion() for one in task.generations)
    assert first.finish_reason == second.finish_reason == "deadline" and first.token_ids != second.token_ids
    assert len(first.token_ids) == 5 and first.score is not None and second.score is not None
    assert first.score >= second.score
    assert llm.loop.scheduler.kv.is_idle and not llm.loop.requests.live


def test_a_stream_brings_all_tokens_at_the_end(make: Callable[..., LLM]) -> None:
    llm = make()
    [wanted] = llm.generate([PROMPTS[1]], PARAMS[1])
    steps = [batch for batch in llm.executor.batches]  # type: ignore[attr-defined]
    pieces = list(llm.stream(PROMPTS[1], PARAMS[1]))
    assert tuple(token for piece in pieces for token in piece.token_ids) == wanted.token_ids
    assert "".join(pieces) == wanted.text and pieces[-1].finish_reason == wanted.finish_reason
    assert len(steps) >= len(wanted.token_ids)


def texts_of(llm: LLM, prompt: list[int], form: str, ending: list[int]) -> dict[str, float]:
    """The scores of all texts of three letters a and b, by the model over all tokens."""
    found = {}
    for letters in itertools.product("ab", repeat=3):
        tokens = [*map(ord, letters), *ending]
        total = sum(
            float(log_softmax(varied([*prompt, *tokens[:n]]))[token]) for n, token in enumerate(tokens)
        )  # fmt: skip
        found["".join(letters)] = total
    assert all(re.fullmatch(form, text) for text in found)
    return found


def test_every_beam_has_its_own_place_in_a_grammar(make: Callable[..., LLM]) -> None:
    """All eight texts are found, best first, none twice; no other text is considered."""
    llm, form = make(), "[ab]{3}"
    every = texts_of(llm, PROMPTS[0], form, [257])
    params = SamplingParams(beams=8, n=8, max_tokens=10, regex=form, early_stopping="never", length_penalty=0.0)
    found = llm.generate([PROMPTS[0]], params)
    assert [one.text for one in found] == sorted(every, key=lambda text: -every[text])
    assert [one.finish_reason for one in found] == ["stop"] * 8
    np.testing.assert_allclose([one.score for one in found], sorted(every.values(), reverse=True), rtol=1e-4)
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    pair = SamplingParams(beams=4, n=2, max_tokens=30, json_schema=schema)
    found = llm.generate([PROMPTS[0]], pair)
    assert sorted("".join(one.text.split()) for one in found) == ["[1,2]", "[2,1]"]


@pytest.mark.parametrize(
    ("n", "found", "form"),
    [
        (2, 1, {"allowed_token_ids": (ord("a"),)}),  # up to max_tokens
        (4, 2, {"regex": "[xy]"}),
        (3, 1, {"regex": "abc"}),
        (1, 0, {"allowed_token_ids": (257,), "min_tokens": 2, "regex": "a"}),
    ],
)
def test_beams_tell_where_there_are_fewer_texts_than_wanted(
    make: Callable[..., LLM], n: int, found: int, form: dict[str, Any]
) -> None:
    """Neither a text that the grammar does not let end, nor one that does not exist, is returned."""
    llm = make()
    params = SamplingParams(beams=4, n=n, max_tokens=4, **form)
    with pytest.raises(RequestError, match=f"found {found} of the {n} texts") as caught:
        llm.generate([PROMPTS[0]], params)
    assert caught.value.field == "n"
    if found:
        texts = [one.text for one in llm.generate([PROMPTS[0]], replace(params, n=found))]
        assert len(set(texts)) == found and all(re.fullmatch(form.get("regex", "a{4}"), text) for text in texts)
    assert llm.loop.scheduler.kv.is_idle and not llm.loop.requests.live


def test_stop_strings_end_a_beam(make: Callable[..., LLM]) -> None:
    llm = make()
    params = SamplingParams(beams=4, n=4, max_tokens=6, early_stopping=True, allowed_token_ids=tuple(b"xyz"), stop="yx")
    found = llm.generate([PROMPTS[0]], params)
    for one in found:
        raw = bytes(one.token_ids).decode()
        assert one.finish_reason == ("stop" if "yx" in raw else "length") and one.text == raw.removesuffix("yx")
        assert "yx" not in raw[:-1]
    assert any(one.finish_reason == "stop" for one in found)


def test_penalties_are_on_log_probabilities() -> None:
    params = SamplingParams(beams=2, repetition_penalty=1.5, logit_bias={3: 1.0}, min_tokens=1, temperature=0)
    logits = varied([1], 6)
    found = Sampler(params.resolve(SamplingDefaults()), [4], 6, [5]).log_probabilities(logits)
    wanted = log_softmax(logits.astype(np.float64))
    wanted[4] *= 1.5
    wanted[3] += 1.0
    wanted[5] = -math.inf
    assert found is not None
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"length_penalty": 2.0}, "length_penalty", "only a beam search has it"),
        ({"early_stopping": True}, "early_stopping", "only a beam search has it"),
        ({"beams": 2, "early_stopping": "always"}, "early_stopping", "must be true, false or"),
        ({"beams": 2, "early_stopping": 1}, "early_stopping", "must be true, false or"),
        ({"beams": 2, "temperature": 0.7}, "temperature", "does not sample"),
        ({"beams": 2, "n": 3}, "n", "must not exceed beams"),
        ({"beams": 65}, "beams", "must be from 1 to 64"),
        ({"seed": -1}, "seed", "must be from 0 to 18446744073709551615"),
        ({"watermark": "kgw:0"}, "watermark", "must be an integer from 1 to 18446744073709551615"),
        ({"beams": 2, "length_penalty": math.nan}, "length_penalty", "must be from -10 to 10"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        SamplingParams(**given)
    assert caught.value.field == field


def test_beams_do_not_sample_where_the_engine_does_by_itself() -> None:
    params = SamplingParams(beams=2).resolve(SamplingDefaults(temperature=0.8, repetition_penalty=1.1))
    assert params.temperature == 0 and params.repetition_penalty == 1.1
    assert replace(params, n=2).beams == 2


def test_nothing_is_generated_where_there_is_no_room(make: Callable[..., LLM]) -> None:
    llm = make()
    generations = llm.loop.add(list(range(64)), SamplingParams(beams=2, n=2))
    assert all(isinstance(one, Generation) and one.finish_reason == "length" for one in generations)
    assert not llm.loop.requests.live


def test_many_at_once_from_asyncio(make: Callable[..., LLM]) -> None:
    wanted = [texts(make().generate([prompt], params)) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]

    async def ask() -> tuple[list[Any], list[str]]:
        async with AsyncLLM(make) as llm:
            asked = [llm.generate([prompt], params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
            found = await asyncio.gather(*asked)
            return found, [piece async for piece in llm.stream(PROMPTS[1], PARAMS[1])]

    found, pieces = asyncio.run(ask())
    assert [texts(one) for one in found] == wanted and "".join(pieces) == found[1][0].text
