"""Typical acceptance (Cai et al. 2024, section 2.3.1): a guess is kept where it is probable enough, not where the model
would have drawn it. Lossy: the output no longer has the model's distribution. Nothing uses it unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..batch.scheduled import Draft
from ..errors import UsageError
from ..requests.sampler import AcceptedTokens, SampledToken, Sampler
from .modes import LOSSLESS, TYPICAL


@dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """A guess of probability p passes if p > min(epsilon, delta * exp(-H)), where H is the entropy, in nats, of the
    distribution that its place is sampled from: with temperature, top-k, top-p and min-p."""

    epsilon: float = 0.09
    delta: float = 0.3

    def passing(self, probabilities: np.ndarray) -> np.ndarray:
        """Which tokens pass, bool `[vocab]`; probabilities: float64 `[vocab]`, their sum 1."""
        known = probabilities[probabilities > 0]
        entropy = -(known * np.log(known)).sum()
        return probabilities > min(self.epsilon, self.delta * float(np.exp(-entropy)))

    def follow(self, draft: Draft, logits: np.ndarray, sampler: Sampler, end_ids: Collection[int]) -> AcceptedTokens:
        """The longest path of passing guesses, the likeliest of these, and a token sampled behind it.

        logits: float32 `[1 + guesses, vocab]`, row 0 the last token's, row 1 + i that of guess i.
        """
        path = self._best_path(draft, logits, sampler)
        samples: list[SampledToken | None] = []
        row = 0
        for depth, guess in enumerate(path):
            samples.append(sampler.take(logits[row], draft.token_ids[guess]))
            if draft.token_ids[guess] in end_ids:
                return AcceptedTokens(tuple(samples), path[:depth], row)
            row = 1 + guess
        return AcceptedTokens((*samples, sampler.sample(logits[row])), path, row)

    def _best_path(self, draft: Draft, logits: np.ndarray, sampler: Sampler) -> tuple[int, ...]:
        """Guesses come behind those that they follow, so that one walk over them finds every path that passes."""
        rows: dict[int, np.ndarray] = {}  # parent -> log-probability of each token that passes behind it, else -inf
        paths: dict[int, tuple[float, tuple[int, ...]]] = {-1: (0.0, ())}
        for guess, (parent, token) in enumerate(zip(draft.parents, draft.token_ids, strict=True)):
            if parent not in paths:
                continue
            if parent not in rows:
                rows[parent] = self._scores(logits[parent + 1], sampler)
            score = float(rows[parent][token])
            if score > -np.inf:
                paths[guess] = paths[parent][0] + score, (*paths[parent][1], guess)
        return max(paths.values(), key=lambda found: (len(found[1]), found[0]))[1]

    def _scores(self, logits: np.ndarray, sampler: Sampler) -> np.ndarray:
        if not np.isfinite(logits.max()):  # a row that is no numbers accepts nothing
            return np.full(len(logits), -np.inf)
        probabilities = sampler.distribution(logits)
        with np.errstate(divide="ignore"):
            return np.where(self.passing(probabilities), np.log(probabilities), -np.inf)


def read_acceptance(text: str) -> TypicalAcceptance | None:
    """`--spec-accept`: "lossless" (None), "typical" or "typical:EPSILON,DELTA". UsageError if it is none of them."""
    name, _, numbers = text.partition(":")
    if text == LOSSLESS:
        return None
    try:
        found = TypicalAcceptance(*map(float, numbers.split(","))) if numbers else TypicalAcceptance()
        if name == TYPICAL and 0 < found.epsilon <= 1 and 0 < found.delta <= 1:
            return found
    except (ValueError, TypeError):
        pass
    raise UsageError(
        f"--spec-accept {text!r} is unknown",
        "give lossless, typical or typical:EPSILON,DELTA, each above 0 and at most 1",
    )
