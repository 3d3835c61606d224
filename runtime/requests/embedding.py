"""Embedding: the hidden states of one prompt's tokens become one vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from ..format.manifest import EmbeddingFacts
from .scores import Scores

_SMALLEST = 1e-12  # length below which a vector is not scaled up to 1, as sentence-transformers has it


class Embedding:
    """A prompt that is under way as the request `scores`.

    Of a mean every row counts, else the one row that the request asks for.
    """

    def __init__(self, scores: Scores, facts: EmbeddingFacts) -> None:
        self.scores = scores
        self._facts = facts
        self._missing = len(scores.prompt) if facts.pooling == "mean" and not facts.pooled else 1
        self._count = self._missing
        self._sum = np.zeros(facts.dimension, dtype=np.float64)

    def advance(self) -> None:
        """Take in the hidden states that came since the last call. Raises what ended the request."""
        for chunk in self.scores.take():
            self._missing -= len(chunk)
            for row in chunk:  # one after the other, so that the bits do not depend on how steps cut the prompt
                self._sum += row

    @property
    def complete(self) -> bool:
        return not self._missing

    def vector(self) -> np.ndarray:
        """The vector, float32 `[dimension]`, once it is complete."""
        vector = (self._sum / self._count).astype(np.float32)
        return scaled(vector) if self._facts.normalize else vector


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
