"""Typical acceptance (Cai et al. 2024, section 2.3.1): a guess is accepted if it is probable enough, not only if the
model would have sampled it. This is lossy: the output no longer has the model's distribution. It is used only on
request.
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
    """A guess of probability p is accepted if p > min(epsilon, delta * exp(-H)), where H is the entropy, in nats, of
    the distribution at its position, after temperature, top-k, top-p and min-p."""

    epsilon: float = 0.09
    delta: float = 0.3

    def passing(self, probabilities: np.ndarray) -> np.ndarray:
        """The tokens that would be accepted, bool `[vocab]`; probabilities: float64 `[vocab]` with sum 1."""
        known = probabilities[probabilities > 0]
        entropy = -(known * np.log(known)).sum()
        return probabilities > min(self.epsilon, self.delta * float(np.exp(-entropy)))

    def follow(self, draft: Draft, logits: np.ndarray, sampler: Sampler, end_ids: Collection[int]) -> AcceptedTokens:
        """Accept the longest path of passing guesses, the likeliest of these, and sample a token after it.

        logits: float32 `[1 + guesses, vocab]`, row 0 for the last token, row 1 + i for guess i.
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
        """The best path of passing guesses, as indices. Guesses come after those they follow, so one pass finds every
        such path."""
        rows: dict[int, np.ndarray] = {}  # parent -> log-probability of each token that passes after it, else -inf
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
        if not np.isfinite(logits.max()):  # a row that is not finite accepts nothing
            return np.full(len(logits), -np.inf)
        probabilities = sampler.distribution(logits)
        with np.errstate(divide="ignore"):
            return np.where(self.passing(probabilities), np.log(probabilities), -np.inf)


def read_acceptance(text: str) -> TypicalAcceptance | None:
    """Parse `--spec-accept`: "lossless" (result None), "typical" or "typical:EPSILON,DELTA". UsageError for another
    text."""
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
