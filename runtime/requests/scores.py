"""Scores: the rows of one request that samples nothing, as they come: logits, or the hidden states to embed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..errors import IccError


class NotFinite(IccError):
    """The model gave a request numbers that are none."""


@dataclass(slots=True)
class Scores:
    """Chunks of rows, float32 `[rows, vocab]` or `[rows, dimension]`, that nobody has taken yet. `fault` is what ended
    the request.

    A request that was preempted, or had to begin anew, gives its first rows again; they are dropped here.
    """

    arrival: float
    num_cached_tokens: int | None = None  # of the prompt, found in the prefix cache; None before the first step
    queued_s: float = 0.0  # from its arrival to its first step

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
