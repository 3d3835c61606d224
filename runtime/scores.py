"""Scores: the logits of one scoring request, as they come."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Scores:
    """Chunks of logits, float32 `[rows, vocab]`, that nobody has taken yet. `fault` is what ended the request.

    A request that was preempted, or had to begin anew, gives its first rows again; they are dropped here.
    """

    _chunks: list[np.ndarray] = field(default_factory=list)
    _given: int = 0  # rows taken, ever
    fault: Exception | None = None

    def push(self, rows: np.ndarray, start: int) -> None:
        """Take rows that are valid only now, those of the tokens from number `start` on."""
        new = rows[max(self._given - start, 0) :]
        if len(new):
            self._chunks.append(new.copy())
            self._given += len(new)

    def take(self) -> list[np.ndarray]:
        """What came since the last call. Raises the request's fault."""
        if self.fault is not None:
            raise self.fault
        chunks, self._chunks = self._chunks, []
        return chunks
