"""Scores: a request that samples nothing; its rows as they come: logits, or the hidden states to embed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..batch.scheduled import StepOutcome, Verdict
from ..errors import IccError
from .request import Request

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np


class NotFinite(IccError):
    """The model gave a request numbers that are none."""


class ScoreRequest(Request, eq=False, kw_only=True):
    """Chunks of rows, float32 `[rows, vocab]` or `[rows, dimension]`, that nobody has taken yet.

    finite: whether rows that are no numbers end it. A request that was preempted, or had to begin anew, gives its first
    rows again; they are dropped here.
    """

    finite: bool = False
    _chunks: list[np.ndarray] = msgspec.field(default_factory=list)
    _given: int = 0  # rows taken, ever

    def push(self, rows: np.ndarray, start: int) -> StepOutcome:
        """Take rows `[rows, width]` that are valid only now, those of the tokens from number `start` on."""
        if self.finite and not np.isfinite(rows).all():  # nobody shares its KV
            self.fault = NotFinite("the model failed on this request: its hidden states are not numbers")
            return StepOutcome(self.request_id, None, Verdict.ERROR)
        new = rows[max(self._given - start, 0) :]
        if len(new):
            self._chunks.append(new.copy())
            self._given += len(new)
        return StepOutcome(self.request_id, None)

    def take(self) -> list[np.ndarray]:
        """The chunks, `[rows, width]` each, that came since the last call. Raises what ended the request."""
        if self.fault is not None:
            raise self.fault
        chunks, self._chunks = self._chunks, []
        return chunks
