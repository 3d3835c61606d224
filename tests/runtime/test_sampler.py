"""Sampler: statistics against a plain numpy reference, penalties, determinism, and refused parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from icc.runtime.errors import RequestError
from icc.runtime.format.manifest import SamplingDefaults
from icc.runtime.requests.params import BOUNDS, INTEGERS, SamplingParams
from icc.runtime.requests.sampler import Sampler, draw, token_logprob


def reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution by definition, float64 [vocab]: temperature, then top-k, then top-p, then min-p."""
    values = logits.astype(np.float64) / temperature
    order = sorted(range(len(values)), key=lambda index: (-values[index], index))
    if top_k:
        order = order[:top_k]
    weights = np.exp(values[order] - values.max())
    weights /= weights.sum()
    before = np.cumsum(weights) - weights
    before[0] = -1.0  # at least one candidate
    keep = (before < top_p) & (weights >= min_p * weights[0])
    result = np.zeros(len(values))
    result[np.array(order)[keep]] = weights[keep]
    return result / result.sum()


def chi_square_is_plausible(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Whether the statistic is below its mean plus five standard deviations; impossible outcomes never occur."""
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    total = counts.sum()
    statistic = ((counts[likely] - total * expected[likely]) ** 2 / (total * expected[likely])).sum()
    freedom = likely.sum() - 1
    return statistic <= freedom + 5 * np.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.5, 5, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.3, 20, 0.9, 0.05),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 0.0, 0.0),
    ],
)
def test_samples_follow_the_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(3).normal(0, 2, 40).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=11)
    sampler = Sampler(params.resolve(SamplingDefaults()), [], len(logits))
    tokens = [sample.token_id for _ in range(6000) if (sample := sampler.sample(logits)) is not None]
    counts = np.bincount(tokens, minlength=len(logits))
    assert chi_square_is_plausible(counts, reference(logits, temperature, top_k, top_p, min_p))


def test_top_p_looks_further_when_the_first_candidates_do_not_hold_enough() -> None:
    logits = np.random.default_rng(0).normal(0, 0.1, 5000).astype(np.float32)  # nearly flat: 0.9 needs thousands
    params = SamplingParams(temperature=1.0, top_p=0.9)
    expected = reference(logits, 1.0, 0, 0.9, 0.0)
    uniforms = np.random.default_rng(1).random(500)
    tokens = [draw(logits, params, uniform) for uniform in uniforms]
    assert (expected[tokens] > 0).all()
    assert len(set(tokens)) > 400
    # the uniforms 0 and almost 1 give the first and the last candidate
    order = np.lexsort((np.arange(5000), -logits))
    kept = order[: int((expected > 0).sum())]
    assert draw(logits, params, 0.0) == kept[0]
    assert draw(logits, params, np.nextafter(1.0, 0.0)) == kept[-1]


def test_ties_are_cut_by_the_lowest_token_id() -> None:
    logits = np.zeros(100, dtype=np.float32)
    params = SamplingParams(temperature=1.0, top_k=3)
    assert {draw(logits, params, uniform) for uniform in np.linspace(0, 0.999, 50)} == {0, 1, 2}


def test_the_same_seed_gives_the_same_tokens_and_each_completion_its_own() -> None:
    logits = np.random.default_rng(3).normal(0, 1, 50).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=5).resolve(SamplingDefaults())

    def tokens(index: int) -> list[int]:
        sampler = Sampler(params, [], 50, index=index)
        return [sample.token_id for _ in range(20) if (sample := sampler.sample(logits)) is not None]

    assert tokens(0) == tokens(0) != tokens(1)


def greedy_sampler(prompt: list[int] | None = None, end_ids: tuple[int, ...] = (), **fields: Any) -> Sampler:
    return Sampler(SamplingParams(**fields).resolve(SamplingDefaults()), prompt or [], 4, end_ids)


def sampled(sampler: Sampler, *logits: float) -> int | None:
    sample = sampler.sample(np.array(logits, dtype=np.float32))
    return None if sample is None else sample.token_id


def test_greedy_takes_the_first_largest_and_leaves_the_row_alone() -> None:
    row = np.array([1, 3, 3, 2], dtype=np.float32)
    sampler = greedy_sampler(repetition_penalty=9.0, prompt=[1])
    sample = sampler.sample(row)
    assert sample is not None and sample.token_id == 2
    assert row.tolist() == [1, 3, 3, 2]
    assert sampled(greedy_sampler(), 1, 3, 3, 2) == 1


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    assert sampled(greedy_sampler([0], repetition_penalty=2.0), 3, 2, 0, 0) == 1
    assert sampled(greedy_sampler([0], repetition_penalty=2.0), -1, -1.5, -9, -9) == 1
    sampler = greedy_sampler(repetition_penalty=2.0)
    assert [sampled(sampler, 3, 2, 0, 0) for _ in range(3)] == [0, 1, 0]


def test_presence_counts_once_and_frequency_every_time_in_the_output_only() -> None:
    presence = greedy_sampler([0], presence_penalty=1.0)
    assert [sampled(presence, 3, 2.5, 0, 0) for _ in range(4)] == [0, 1, 0, 0]
    frequency = greedy_sampler([0], frequency_penalty=1.0)
    assert [sampled(frequency, 3, 2.5, 0, 0) for _ in range(5)] == [0, 1, 0, 1, 0]


def test_bias_and_min_tokens() -> None:
    assert sampled(greedy_sampler(logit_bias={2: 5.0, 0: -1.0}), 3, 2, 0, 0) == 2
    sampler = greedy_sampler(end_ids=(0,), min_tokens=2)
    assert [sampled(sampler, 3, 2, 1, 1) for _ in range(3)] == [1, 1, 0]


@pytest.mark.parametrize("bad", [[np.nan, 1, 1, 1], [1, np.inf, 1, 1], [-np.inf] * 4])
def test_logits_that_are_not_numbers_give_no_sample(bad: list[float]) -> None:
    assert sampled(greedy_sampler(), *bad) is None
    assert sampled(greedy_sampler(temperature=1.0), *bad) is None


def test_logprobs_are_those_of_the_model() -> None:
    logits = np.array([1, 3, 2, 0], dtype=np.float32)
    expected = logits - np.log(np.exp(logits).sum())
    result = token_logprob(logits, 0, 2)
    assert result.token_id == 0 and result.logprob == pytest.approx(expected[0], abs=1e-6)
    assert [token for token, _ in result.top] == [1, 2]
    assert [value for _, value in result.top] == pytest.approx(expected[[1, 2]], abs=1e-6)
    sampler = greedy_sampler(logprobs=0, temperature=0.0, logit_bias={0: 100.0})
    sample = sampler.sample(logits)
    assert sample is not None and sample.logprob is not None
    assert sample.logprob.top == () and sample.logprob.logprob == pytest.approx(expected[0], abs=1e-6)


def test_none_means_the_default_of_the_engine() -> None:
    defaults = SamplingDefaults(temperature=0.7, top_k=50)
    resolved = SamplingParams(top_k=3).resolve(defaults)
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.greedy) == (0.7, 3, 1.0, False)
    assert SamplingParams().resolve(SamplingDefaults()).greedy
    assert SamplingParams(temperature=0.0).resolve(defaults).greedy


@pytest.mark.parametrize("name", BOUNDS)
def test_numbers_out_of_bounds_are_refused_by_name(name: str) -> None:
    low, high = BOUNDS[name]
    values: tuple[Any, ...] = (low - 1, high + 1, "1", float("nan"), float("inf"), 10**400, 10**5000, True, [1])
    for value in values:
        with pytest.raises(RequestError, match=name) as caught:
            SamplingParams(**{name: value})
        assert caught.value.field == name
    for value in (low, high):
        kind = int if name in INTEGERS else float
        extra = {"max_tokens": 2**31 - 1} if name == "min_tokens" else {"beams": 2} if name == "length_penalty" else {}
        SamplingParams(**{name: kind(value)}, **extra)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ("",)),
        ("stop", ("x" * 257,)),
        ("stop", ("x",) * 65),
        ("stop", (1,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", 5),
        ("stop", 5),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {"a": 1.0}),
        ("ignore_eos", 1),
        ("include_stop", 1),
        ("bad_words", ((),)),
        ("allowed_token_ids", ()),
        ("min_tokens", 200),
    ],
)
def test_other_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


def test_one_stop_string_need_not_be_in_a_tuple() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[reportArgumentType]


class Even:
    """A constraint that shows token 3 as allowed until it is tried; afterwards only the `exact` tokens."""

    def __init__(self, exact: list[int]) -> None:
        self._exact, self.taken, self._refused = exact, [], False

    def allowed(self) -> np.ndarray:
        return np.isin(np.arange(8), self._exact if self._refused else [3, *self._exact])

    def accept(self, token_id: int) -> bool:
        self._refused = token_id not in self._exact
        self.taken += [] if self._refused else [token_id]
        return not self._refused


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_a_constraint_takes_back_is_sampled_anew(temperature: float) -> None:
    logits = np.array([0, 1, 2, 90, 4, 5, 0, 0], dtype=np.float32)
    params = SamplingParams(temperature=temperature, seed=1).resolve(SamplingDefaults())
    constraint = Even([0, 2, 4])
    sample = Sampler(params, [], 8, constraint=constraint).sample(logits)
    assert sample is not None and [sample.token_id] == constraint.taken and sample.token_id in (0, 2, 4)
    assert Sampler(params, [], 8, constraint=Even([])).sample(logits) is None  # no token is allowed


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({"temperature": 0.0}, 1),
        ({"temperature": 0.0, "logprobs": 1}, 0),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, 0),
        ({"temperature": 0.0, "min_tokens": 2}, 0),
        ({"temperature": 1.0}, 0),
        ({"temperature": 1.0, "top_p": 0.9, "min_p": 0.1}, 0),
        ({"temperature": 1.0, "top_k": 5}, 5),
        ({"temperature": 1.0, "top_k": 5, "top_p": 0.7, "min_p": 0.1}, 5),
        ({"temperature": 1.0, "top_k": 5, "logprobs": 0}, 0),
        ({"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.2}, 0),
        ({"temperature": 1.0, "top_k": 5, "allowed_token_ids": [1, 2]}, 0),
    ],
)
def test_what_is_wanted_of_a_row_is_enough(options: dict[str, Any], wanted: int) -> None:
    """The sample stays the same if all logits but the `wanted` largest (the first ones of equal logits) are minus
    infinity."""
    params = SamplingParams(seed=1, **options)
    whole, few = (Sampler(params, [1, 2], 64, [0]) for _ in range(2))
    assert whole.wanted == wanted
    random = np.random.default_rng(0)
    for _ in range(50 if wanted else 0):
        logits = random.integers(-8, 9, 64).astype(np.float32) / 3
        rest = logits.copy()
        rest[np.argsort(-logits, kind="stable")[wanted:]] = -np.inf
        assert whole.sample(logits) == few.sample(rest)


def test_a_device_draws_another_number_for_each_token_ahead() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=5).resolve(SamplingDefaults()), [], 50)
    rows = [sampler.device_row(ahead) for ahead in range(3)]
    assert [row[-1] for row in rows if row is not None] == [0, 1, 2] and len({row[:-1] for row in rows if row}) == 1
    sampler.count_device_sample()
    row = sampler.device_row(1)
    assert row is not None and row[-1] == 2
