"""Scores: the logits of one scoring request, as they come."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Scores:
    """Chunks of logits, float32 `[rows, vocab]`, that nobody has taken yet. `fault` is what ended the request.

    A request that has to begin anew gives its first rows again; they are dropped here.
    """

    _chunks: list[np.ndarray] = field(default_factory=list)
    _given: int = 0  # rows pushed, ever
    _again: int = 0  # rows to come that were pushed before
    fault: Exception | None = None

    def push(self, rows: np.ndarray) -> None:
        """Take rows that are valid only now."""
        dropped = min(self._again, len(rows))
        self._again -= dropped
        self._given += len(rows) - dropped
        if dropped < len(rows):
            self._chunks.append(rows[dropped:].copy())

    def begin_anew(self) -> None:
        self._again = self._given

    def take(self) -> list[np.ndarray]:
        """What came since the last call. Raises the request's fault."""
        if self.fault is not None:
            raise self.fault
        chunks, self._chunks = self._chunks, []
        return chunks
