"""Embedding: the hidden states of one prompt's tokens become one vector."""

from __future__ import annotations

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


def scaled(vector: np.ndarray) -> np.ndarray:
    """The vector at length 1."""
    return vector / np.maximum(np.linalg.norm(vector), np.float32(_SMALLEST))
