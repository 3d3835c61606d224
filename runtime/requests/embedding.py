"""Embedding: the hidden states of one prompt's tokens become one vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from ..format.manifest import POOLED_ROWS, EmbeddingFacts
from .scores import Scores

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np

_SMALLEST = 1e-12  # length below which a vector is not scaled up to 1, as sentence-transformers has it


class Embedding:
    """A prompt that is under way as the request `scores`.

    Every row counts where all are pooled, else the one row that the request asks for.
    """

    def __init__(self, scores: Scores, facts: EmbeddingFacts) -> None:
        self.scores = scores
        self._facts = facts
        self._missing = len(scores.prompt) if counts_every_row(facts) else 1
        self._count = self._missing
        self._total = np.zeros(facts.dimension, dtype=np.float64)
        if facts.pooling == "max":
            self._total -= np.inf

    def advance(self) -> None:
        """Take in the hidden states that came since the last call. Raises what ended the request."""
        for chunk in self.scores.take():
            for row in chunk:  # one after the other, so that the bits do not depend on how steps cut the prompt
                self._take(row)
                self._missing -= 1

    def _take(self, row: np.ndarray) -> None:
        match self._facts.pooling:
            case "max":
                np.maximum(self._total, row, out=self._total)
            case "weightedmean":
                self._total += float(self._count - self._missing + 1) * row.astype(np.float64)
            case _:
                self._total += row

    @property
    def complete(self) -> bool:
        return not self._missing

    def vector(self) -> np.ndarray:
        """The vector, float32 `[dimension]`, once it is complete."""
        vector = (self._total / _divisor(self._facts, self._count)).astype(np.float32)
        return scaled(vector) if self._facts.normalize else vector


def counts_every_row(facts: EmbeddingFacts) -> bool:
    """Whether the hidden states of all tokens are wanted, which the program does not pool itself."""
    return facts.pooling in POOLED_ROWS and not facts.pooled


def _divisor(facts: EmbeddingFacts, count: int) -> float:
    """What the sum, or the maximum, of `count` rows is divided by."""
    return {"max": 1.0, "weightedmean": count * (count + 1) / 2, "mean_sqrt_len": count**0.5}.get(facts.pooling, count)


@dataclass(frozen=True)
class Ranked:
    """A document of a query: its place in the list that was given, its score, and its text."""

    index: int
    score: float
    document: str


def ranked(documents: Sequence[str], vectors: Sequence[np.ndarray], facts: EmbeddingFacts) -> list[Ranked]:
    """The documents by their scores, the best first."""
    found = [
        Ranked(index, score_of(vector, facts), document)
        for index, (document, vector) in enumerate(zip(documents, vectors, strict=True))
    ]
    return sorted(found, key=lambda one: -one.score)


def score_of(vector: np.ndarray, facts: EmbeddingFacts) -> float:
    """The score of a pair of texts. Of two labels the second means that they belong together: its probability, where
    scores are within 0..1."""
    value = float(vector[0]) if len(vector) == 1 else float(vector[1]) - float(vector[0])
    if facts.scores != "sigmoid":
        return value
    return 1 / (1 + exp(-value)) if value >= 0 else exp(value) / (1 + exp(value))


def scaled(vector: np.ndarray) -> np.ndarray:
    """The vector at length 1."""
    return vector / np.maximum(np.linalg.norm(vector), np.float32(_SMALLEST))
