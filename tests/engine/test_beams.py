"""Beam search by engines of every kind of cache: the texts and scores of transformers' own `generate`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import icc
import numpy as np
import pytest
from sizes import soak

from .conftest import Compiled

PROMPT = [1, 17, 93, 44, 8, 61, 30, 30, 5, 77, 12]
# with so many stop tokens some texts always end, even with random models
ENDS = [2, 9, 23, 31, 40, 58, 66, 71, 84, 95, 101, 110]
# caches of keys and values, windows, latents, three kinds of recurrent states; learned positions
MODELS = [
    *((name, {}) for name in ("llama", "gemma3", "qwen3_next-delta_rule")),
    *soak(("deepseek_v3-latent_grouped_routing", {})),
    *soak(("lfm2-short_convolutions", {}), ("gpt2", {}), ("llama", {"tensor_parallel": 2})),
]
CASES: dict[str, dict[str, Any]] = {
    "until all have ended": {"beams": 4, "n": 4, "early_stopping": True, "ends": ENDS},
    "until none is likely to be better": {"beams": 3, "n": 2, "length_penalty": 0.6, "ends": ENDS},
    "until none can be better": {"beams": 4, "n": 3, "early_stopping": "never", "length_penalty": 1.4, "ends": ENDS},
    "short ones first": {"beams": 5, "n": 5, "early_stopping": "never", "length_penalty": -0.8, "ends": ENDS[:3]},
    "to the last token": {"beams": 2, "n": 2, "length_penalty": 0.0, "repetition_penalty": 1.3, "min_tokens": 6},
}


def transformers_beams(oracle: Any, prompt: list[int], max_tokens: int, case: dict[str, Any]) -> Any:
    import torch

    case = dict(case)
    ends = case.pop("ends", [2])
    if (least := case.pop("min_tokens", None)) is not None:
        case["min_new_tokens"] = least
    return oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=case.pop("beams"),
        num_return_sequences=case.pop("n"),
        max_new_tokens=max_tokens,
        eos_token_id=ends,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **case,
    )


def own_params(max_tokens: int, case: dict[str, Any], **more: Any) -> icc.SamplingParams:
    ends = case.get("ends", [2])
    given = {name: value for name, value in case.items() if name != "ends"}
    return icc.SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, stop_token_ids=tuple(ends), logprobs=0, **given, **more
    )


def check(completions: list[icc.Completion], found: Any, oracle: Any, ends: list[int]) -> None:
    """Check for equal texts in equal order, with equal scores and log-probabilities of tokens."""
    start = len(completions[0].prompt_token_ids)
    shares = oracle.compute_transition_scores(found.sequences, found.scores, found.beam_indices).numpy()
    assert len(completions) == len(found.sequences)
    lengths = (found.beam_indices >= 0).sum(dim=1).tolist()  # later tokens are padding
    for one, sequence, length, score, share in zip(
        completions, found.sequences.tolist(), lengths, found.sequences_scores.tolist(), shares, strict=True
    ):
        tokens = sequence[start : start + length]
        assert list(one.token_ids) == tokens
        assert one.score == pytest.approx(score, abs=2e-4, rel=2e-4)
        assert one.finish_reason == ("stop" if tokens[-1] in ends else "length")
        assert one.logprobs is not None
        assert [logprob.token_id for logprob in one.logprobs] == tokens
        np.testing.assert_allclose([p.logprob for p in one.logprobs], share[: len(tokens)], atol=2e-4)


@pytest.mark.parametrize(("model", "options"), MODELS)
def test_texts_and_scores_are_those_of_transformers(
    compiled: Callable[..., Compiled], model: str, options: dict[str, Any]
) -> None:
    """Five cases for each of six models, and for one that two processes run together; one at a time, and all at the
    same time with shared prefixes."""
    made = compiled(model, **options)
    source = random.Random(7)
    asked = []
    for number, case in enumerate(CASES.values()):
        prompt = PROMPT[: 5 + 2 * number] + [source.randrange(3, 120) for _ in range(number)]
        asked.append((prompt, 9 + number, case))
    found = [transformers_beams(made.oracle, *one) for one in asked]
    with icc.load(made.engine, threads=2 if options else 1) as llm:
        params = [own_params(max_tokens, case) for _, max_tokens, case in asked]
        for (prompt, _, case), own, theirs in zip(asked, params, found, strict=True):
            check(llm.generate([prompt], own), theirs, made.oracle, case.get("ends", [2]))
        together = llm.generate([prompt for prompt, _, _ in asked], params)
        for (_, _, case), theirs in zip(asked, found, strict=True):
            check(together[: case["n"]], theirs, made.oracle, case.get("ends", [2]))
            del together[: case["n"]]
        assert llm.loop.scheduler.kv.is_idle
        llm.loop.scheduler.check()


class Forced:
    """A grammar that allows one text."""

    def __init__(self, tokens: list[int], vocab: int) -> None:
        self._left, self._vocab = tokens, vocab

    def allowed(self) -> np.ndarray:
        return np.arange(self._vocab) == self._left[0]

    def accept(self, token_id: int) -> bool:
        self._left = self._left[1:]
        return True

    def copy(self) -> Forced:
        return Forced(self._left, self._vocab)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gemma3", {}),
        ("qwen3_next-delta_rule", {}),
        ("llama", {"kv_policy": "h2o:budget=64,recent=16"}),
        *soak(
            ("deepseek_v3-latent_grouped_routing", {}),
            ("llama", {"kv_policy": "snapkv:budget=64,recent=16"}),
            ("llama", {"kv_policy": "streaming:sinks=4,window=32"}),
            ("llama", {"kv_cache": "int4"}),
        ),
    ],
)
def test_a_beam_sees_what_its_text_alone_would(
    compiled: Callable[..., Compiled], model: str, options: dict[str, Any]
) -> None:
    """Each text that the beams find is generated again by itself, token by token, and has the same log-probabilities,
    though beams were preempted; also with caches that transformers does not have."""
    made = compiled(model, **options)
    prompt = random.Random(3).choices(range(3, 119), k=75)
    params = icc.SamplingParams(beams=4, n=4, max_tokens=24, logprobs=0, ignore_eos=True, early_stopping="never")
    with icc.load(made.engine, threads=1) as llm:
        found = llm.generate([prompt], params)
        again = llm.submit(llm.prompting.completion(prompt, params))
        for step in itertools.count(1):
            if again.done:
                break
            llm.driver.step()
            if step % 7 == 0 and llm.loop.scheduler.num_running:
                llm.loop.scheduler.queues.preempt(llm.loop.scheduler.queues.running[-1])
        assert llm.loop.scheduler.num_preemptions >= 3
        assert [one.completion().token_ids for one in again.generations] == [one.token_ids for one in found]
        for one in found:
            alone = llm.loop.add(
                prompt,
                icc.SamplingParams(max_tokens=24, logprobs=0, ignore_eos=True, temperature=0.0),
                constrain=lambda tokens=list(one.token_ids): Forced(tokens, 120),
            )[0]
            while llm.loop.has_work():
                llm.loop.step()
            assert tuple(alone.token_ids) == one.token_ids and one.logprobs is not None
            np.testing.assert_allclose(
                [each.logprob for each in alone.logprobs], [each.logprob for each in one.logprobs], atol=1e-4
            )
