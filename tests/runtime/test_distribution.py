"""At temperatures above 0, samples with speculation have the model's distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from icc.runtime.batch.scheduled import Draft
from icc.runtime.format.lookahead import Lookahead
from icc.runtime.format.manifest import Manifest
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeExecutor
from icc.runtime.requests.params import SamplingParams
from icc.runtime.speculate.lookahead import LookaheadDrafter
from icc.runtime.speculate.speculator import Speculator
from icc.runtime.speculate.verify import AcceptedTokens, follow
from oracle_drafters import Fixed
from sizes import size_of

SMALL, DRAWS = size_of("small_vocabulary"), size_of("draws")
TOKENS = 20  # tokens of a text; each is a draw
TREE = Draft((3, 0, 4, 1, 2), (-1, -1, 1, 1, 0))  # siblings, two of them with children


class Table(FakeExecutor):
    """Logits that depend on the last two tokens modulo 3; tokens 0 to 4 are the likeliest."""

    def _logits(self, context: list[int]) -> np.ndarray:
        return logits(tuple(token % 3 for token in context[-2:]))


@cache
def logits(kinds: tuple[int, ...]) -> np.ndarray:
    source = np.random.default_rng([SMALL, *kinds])
    return (source.normal(0.0, 1.0, SMALL) + 2.5 * (np.arange(SMALL) < 5)).astype(np.float32)


def chi_square(manifest: Manifest, drafter: Any, least: float) -> tuple[float, float]:
    """The chi-square statistic of tokens that are sampled with guesses, against the model's probabilities, by the two
    tokens before; and its critical value, which is exceeded once in ten thousand runs. least: the least share of
    accepted guesses among the draws."""
    executor = Table(vocab_size=SMALL, num_blocks=200, max_step_tokens=64, max_logit_rows=64)
    llm = LLM(manifest, executor, speculator=Speculator(drafter, adaptive=False))
    prompt, count = [1, 2], -(-DRAWS // (16 * TOKENS))
    params = [SamplingParams(max_tokens=TOKENS, temperature=1.0, n=16, seed=seed) for seed in range(count)]
    seen: Counter[tuple[int, int, int]] = Counter()
    for text in llm.generate([prompt] * count, params):
        whole = [*prompt, *text.token_ids]
        seen.update((a % 3, b % 3, token) for a, b, token in zip(whole, whole[1:], whole[2:], strict=False))
    assert llm.loop.speculator.counts.accepted > DRAWS * least
    total, freedom = 0.0, 0
    for kinds in itertools.product(range(3), repeat=2):
        weights = np.exp(logits(kinds).astype(np.float64))
        found = np.array([seen[*kinds, token] for token in range(SMALL)])
        expected = found.sum() * weights / weights.sum()
        rare = expected < 5  # tokens that are too rare for the statistic count as one
        cells = [*zip(found[~rare], expected[~rare], strict=True), (found[rare].sum(), expected[rare].sum())]
        cells = [cell for cell in cells if cell[1] >= 5]
        total += sum((number - mean) ** 2 / mean for number, mean in cells)
        freedom += len(cells) - 1
    spread = 2 / (9 * freedom)  # Wilson and Hilferty 1931
    return total, freedom * (1 - spread + 3.72 * spread**0.5) ** 3


def siblings(draft: Draft | None, row: int) -> list[int]:
    """The guesses that follow a logit row."""
    pairs = [] if draft is None else zip(draft.token_ids, draft.parents, strict=True)
    return [token for token, parent in pairs if parent == row - 1]


def resampling(draft: Draft | None, sample: Callable[[int], Any], end_ids: Any) -> AcceptedTokens:
    """A known mistake: after a rejection the token is drawn from the model's whole distribution, instead of the rest
    that the rejected guesses leave."""

    def again(row: int) -> Any:
        found = sample(row)
        guesses = siblings(draft, row)
        return sample(row) if guesses and found.token_id not in guesses else found

    return follow(draft, again, end_ids)


def trusting(draft: Draft | None, sample: Callable[[int], Any], end_ids: Any) -> AcceptedTokens:
    """Another mistake: the first guess is accepted although the model has drawn token 2."""

    def first(row: int) -> Any:
        found = sample(row)
        guesses = siblings(draft, row)
        return found._replace(token_id=guesses[0]) if guesses and found.token_id == 2 else found

    return follow(draft, first, end_ids)


@pytest.mark.parametrize(
    ("drafter", "walk", "is_right"),
    [
        ("tree", follow, True),
        ("tree", resampling, False),
        ("tree", trusting, False),
        ("lookahead", follow, True),
        ("lookahead", trusting, False),
    ],
)
def test_samples_have_the_models_distribution(
    toy_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch, drafter: str, walk: Any, is_right: bool
) -> None:
    """Tested by chi-square; wrong implementations must fail."""
    monkeypatch.setattr("icc.runtime.loop.stepping.follow", walk)
    guessing, least = (Fixed(TREE), 1 / 14) if drafter == "tree" else (LookaheadDrafter(Lookahead(3, 3, 3)), 1 / 50)
    found, critical = chi_square(toy_manifest(vocab_size=SMALL, eos_token_ids=[]), guessing, least)
    assert (found < critical) == is_right
