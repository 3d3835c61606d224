"""With temperature, what speculation gives has the model's distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from icc.runtime.batch.scheduled import Draft
from icc.runtime.format.manifest import Manifest
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeExecutor
from icc.runtime.requests.params import SamplingParams
from icc.runtime.speculate.speculator import Speculator
from icc.runtime.speculate.verify import AcceptedTokens, follow
from oracle_drafters import Fixed
from sizes import size_of

SMALL, DRAWS = 5, size_of("draws")
TREE = Draft((3, 0, 4, 1, 2), (-1, -1, 1, 1, 0))  # some siblings, one of them with children
CRITICAL = 190.0  # chi-square with 124 degrees of freedom exceeds it about once in ten thousand


class Table(FakeExecutor):
    """Five tokens; the logits depend on the last two."""

    def _logits(self, context: list[int]) -> np.ndarray:
        source = np.random.default_rng([SMALL, *context[-2:]])
        return source.normal(0.0, 1.0, self.vocab_size).astype(np.float32)


def chi_square(manifest: Manifest) -> float:
    """The first tokens after a prompt, drawn many times with guesses, against the model's own probabilities."""
    executor = Table(vocab_size=SMALL, num_blocks=64, max_step_tokens=64, max_logit_rows=64)
    llm = LLM(manifest, executor, speculator=Speculator(Fixed(TREE), adaptive=False))
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


def resampling(draft: Draft | None, sample: Callable[[int], Any], end_ids: Any) -> AcceptedTokens:
    """A known mistake: after a rejection the token is drawn from the model's distribution as a whole, and not from what
    the rejected guesses have left of it."""

    def again(row: int) -> Any:
        found = sample(row)
        guesses = siblings(draft, row)
        return sample(row) if guesses and found.token_id not in guesses else found

    return follow(draft, again, end_ids)


def trusting(draft: Draft | None, sample: Callable[[int], Any], end_ids: Any) -> AcceptedTokens:
    """Another: the first guess is taken where the model would have drawn it only perhaps."""

    def first(row: int) -> Any:
        found = sample(row)
        guesses = siblings(draft, row)
        return found._replace(token_id=guesses[0]) if guesses and found.token_id == 2 else found

    return follow(draft, first, end_ids)


@pytest.mark.parametrize(("walk", "is_right"), [(follow, True), (resampling, False), (trusting, False)])
def test_samples_have_the_models_distribution(
    toy_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch, walk: Any, is_right: bool
) -> None:
    """Chi-square over the triples of a small vocabulary; two wrong implementations must fail it."""
    monkeypatch.setattr("icc.runtime.loop.stepping.follow", walk)
    assert (chi_square(toy_manifest(vocab_size=SMALL, eos_token_ids=[])) < CRITICAL) == is_right
