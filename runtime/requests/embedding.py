"""Embedding: the hidden states of one prompt's tokens become one vector."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import TYPE_CHECKING

import msgspec

from ..errors import RequestError
from ..format.manifest import POOLED_ROWS, EmbeddingFacts
from .scores import ScoreRequest
from .tail import Tail, scaled

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np


class PooledRequest:
    """A prompt whose hidden states are read by the request `scores`.

    All rows are pooled if the pooling uses every token; else the one row that the request asks for. tail: layers after
    the pooling. skipped: how many of the first tokens are not pooled; at least the last token is.
    """

    def __init__(self, scores: ScoreRequest, facts: EmbeddingFacts, tail: Tail = (), skipped: int = 0) -> None:
        self.scores = scores
        self._facts, self._tail = facts, tail
        rows = len(scores.prompt) if counts_every_row(facts) else 1
        self._first, self._rows, self._seen = min(skipped, rows - 1), rows, 0
        self._totals = {kind: np.zeros(facts.row_width, dtype=np.float64) for kind in (facts.pooling, *facts.also)}
        if "max" in self._totals:
            self._totals["max"] -= np.inf

    def advance(self) -> None:
        """Take in the hidden states that arrived since the last call. Raises the error that ended the request."""
        for chunk in self.scores.take():
            for row in chunk:  # row by row, so that the bits do not depend on the chunks of the prompt
                if self._seen >= self._first:
                    self._take(row)
                self._seen += 1

    def _take(self, row: np.ndarray) -> None:
        for kind, total in self._totals.items():
            match kind:
                case "max":
                    np.maximum(total, row, out=total)
                case "weightedmean":
                    total += float(self._seen + 1) * row.astype(np.float64)
                case "cls" if self._seen > self._first:
                    pass
                case "last" if self._seen < self._rows - 1:
                    pass
                case _:
                    total += row

    @property
    def complete(self) -> bool:
        """Whether all rows to pool have arrived."""
        return self._seen >= self._rows

    def vector(self) -> np.ndarray:
        """The vector, float32 `[dimension]`, once it is complete."""
        parts = [total / self._divisor(kind) for kind, total in self._totals.items()]
        vector = (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.float32)
        for layer in self._tail:
            vector = layer(vector)
        return scaled(vector) if self._facts.normalize else vector

    def _divisor(self, kind: str) -> float:
        """The divisor for the sum, or the maximum, of the pooled rows."""
        first, last = self._first, self._rows
        weights = (last * (last + 1) - first * (first + 1)) / 2
        return {"mean": last - first, "weightedmean": weights, "mean_sqrt_len": (last - first) ** 0.5}.get(kind, 1.0)


def counts_every_row(facts: EmbeddingFacts) -> bool:
    """Whether the hidden states of all tokens are needed, because the program does not pool them itself."""
    return not facts.pooled and (facts.pooling in POOLED_ROWS or bool(facts.also) or facts.skips_prompt)


def shortened(vector: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first `dimensions` elements of a vector, scaled to length 1 if that leaves any out; None: the whole
    vector."""
    return vector if dimensions is None or dimensions >= len(vector) else scaled(vector[:dimensions])


def stacked(vectors: Sequence[np.ndarray], facts: EmbeddingFacts, dimensions: int | None) -> np.ndarray:
    """Vectors as one array [n, dimensions], each `shortened`; dimensions None: all elements. RequestError if
    `dimensions` is not in 1 .. the model's dimension."""
    width = facts.dimension if dimensions is None else dimensions
    if not 1 <= width <= facts.dimension:
        raise RequestError(
            f"dimensions: must be from 1 to the {facts.dimension} of the model's vectors", field="dimensions"
        )
    found = [shortened(vector, dimensions) for vector in vectors]
    return np.stack(found) if found else np.empty((0, width), dtype=np.float32)


class Ranked(msgspec.Struct, frozen=True):
    """A document ranked for a query: its index in the given list, its score, and its text."""

    index: int
    score: float
    document: str


def ranked(documents: Sequence[str], vectors: Sequence[np.ndarray], facts: EmbeddingFacts) -> list[Ranked]:
    """The documents by descending score. vectors: logits `[labels]` per document, see `score_of`."""
    found = [
        Ranked(index, score_of(vector, facts), document)
        for index, (document, vector) in enumerate(zip(documents, vectors, strict=True))
    ]
    return sorted(found, key=lambda one: -one.score)


def score_of(vector: np.ndarray, facts: EmbeddingFacts) -> float:
    """The score of a pair of texts from its logits `[labels]`. Of two labels, the second means that the texts belong
    together; the score is its probability if `facts.scores` is "sigmoid"."""
    value = float(vector[0]) if len(vector) == 1 else float(vector[1]) - float(vector[0])
    if facts.scores != "sigmoid":
        return value
    return 1 / (1 + exp(-value)) if value >= 0 else exp(value) / (1 + exp(value))
